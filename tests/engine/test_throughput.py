"""The throughput benchmark on a tiny model: it makes what it says, and it notices wrong tokens."""

import pytest
import torch

from engine.benchmarks import throughput
from engine.benchmarks.throughput import Work
from lorikeet_engine.engine import EngineSettings
from lorikeet_engine.sampling import Sampler

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WORKS = (Work("base", 20, 6, requests=5), Work("2 adapters", 20, 6, adapters=2, requests=5))


def run(folder):
    settings = EngineSettings(model=folder, cache_dir=folder, max_rank=16, max_running=4)
    return throughput.run(CONFIG, settings, WORKS, folder / "made")


def test_every_row_is_checked_and_timed(tmp_path, capsys):
    rows = run(tmp_path)
    assert [row.work for row in rows] == list(WORKS)
    assert all(row.tokens_per_s > 0 and row.gap < 1e-4 for row in rows)
    assert "2 adapters" in capsys.readouterr().out


def test_wrong_tokens_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(Sampler, "sample", lambda self, logits, rows: torch.argmin(logits, -1))
    with pytest.raises(AssertionError, match="plain path"):
        run(tmp_path)
