"""The checkpoint of random weights that benchmarks load."""

import pytest
import torch

from engine.benchmarks import random_checkpoint
from tests.engine.tiny_engine import CONFIG


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES", 50_000)
    folder = tmp_path / "model"
    return random_checkpoint.write_checkpoint(folder, CONFIG, torch.device("cpu"))


def test_it_has_several_files(checkpoint):
    assert len(list(checkpoint.glob("model-*-of-*.safetensors"))) > 2


def test_what_is_there_is_not_written_again(checkpoint):
    before = {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    random_checkpoint.write_checkpoint(checkpoint, CONFIG, torch.device("cpu"))
    assert {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before
