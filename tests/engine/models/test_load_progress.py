"""Log of a load's progress: once a second, with the bytes read."""

import logging
from types import SimpleNamespace

import pytest
import torch

from lorikeet_engine.models import load_progress
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.models.load_progress import LoadProgress


@pytest.fixture
def clock(monkeypatch):
    """Clock of the log, which a test moves."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(load_progress, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def logged(caplog):
    found = [each for each in caplog.records if each.getMessage() == "weights_loading"]
    return [(each.read_bytes, each.total_bytes) for each in found]


def test_progress_is_logged_once_a_second(clock, caplog):
    caplog.set_level(logging.INFO)
    progress = LoadProgress(100)
    for now_s, count in ((0.5, 10), (1.0, 20), (1.9, 30), (2.5, 40)):
        clock.now_s = now_s
        progress.add(count)
    assert logged(caplog) == [(30, 100), (100, 100)]


def test_nothing_is_logged_without_a_total(clock, caplog):
    caplog.set_level(logging.INFO)
    progress = LoadProgress(0)
    clock.now_s = 5.0
    progress.add(10)
    assert logged(caplog) == []


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_loaded_model_has_read_all_bytes_of_its_file(
    tiny_checkpoints, family, clock, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(load_progress, "_INTERVAL_S", 0.0)
    folder = tiny_checkpoints[family]
    load_model(folder, torch.device("cpu"), torch.float32)
    read = logged(caplog)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size // 2 < read[-1][0] == read[-1][1] < size
