"""The checkpoint of random weights that benchmarks load."""

import pytest
import torch

from engine.benchmarks import random_checkpoint
from engine.benchmarks.random_model import GEMMA_3_12B, random_model, write_config
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


def test_a_model_whose_norms_are_stored_less_one_is_made_up(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 100, "head_dim": 32}
    folder = write_config(tmp_path, GEMMA_3_12B | sizes | {"num_hidden_layers": 6})
    model = random_model(folder, torch.device("cpu"), torch.float32, 4096)
    assert model.config.kv_groups.windows == (None, *[1024] * 5)
    assert torch.equal(model._norm.weight, torch.ones(64))
