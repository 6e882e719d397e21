"""The start-up benchmark on a tiny model: it writes what it loads, and it notices wrong weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.benchmarks import random_checkpoint, startup
from lorikeet_engine.engine import EngineSettings
from lorikeet_engine.models.staging import Staging
from tests.engine.tiny_engine import CONFIG

SETTINGS = EngineSettings(Path(), Path(), kv_bytes=1 << 20, max_running=4)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES", 50_000)
    folder = tmp_path / "model"
    return random_checkpoint.write_checkpoint(folder, CONFIG, torch.device("cpu"))


def test_every_stage_of_a_start_is_timed(checkpoint, capsys):
    assert len(list(checkpoint.glob("model-*-of-*.safetensors"))) > 2
    took = startup.measure(checkpoint, SETTINGS)
    assert 0 < took["weights_s"] < took["all_s"]
    assert took["kv_tokens"] == 2048
    startup.show(took)
    assert "weights" in capsys.readouterr().out


def test_what_is_there_is_not_written_again(checkpoint):
    before = {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    random_checkpoint.write_checkpoint(checkpoint, CONFIG, torch.device("cpu"))
    assert {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before


def test_wrong_weights_are_noticed(checkpoint, monkeypatch):
    copy = Staging.copy

    def copy_from_before(self, span, out):
        copy(self, replace(span, begin=span.begin - 4), out)

    monkeypatch.setattr(Staging, "copy", copy_from_before)
    with pytest.raises(AssertionError, match="lm_head"):
        startup.measure(checkpoint, SETTINGS)
