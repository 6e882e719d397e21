"""The prefill benchmark counts what torch counts, and holds its logits against the plain path."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.benchmarks import prefill
from engine.benchmarks.random_model import random_model, write_config
from tests.engine.tiny_engine import CONFIG


@pytest.fixture
def model(tmp_path: Path):
    config = write_config(tmp_path / "model", CONFIG)
    return random_model(config, torch.device("cpu"), torch.float32)


def test_the_rate_is_of_work_over_time(model, capsys):
    row = prefill.measure(model, sequences=2, tokens=37, square=64)
    flops = prefill.flops(model.config, 2, 37)
    assert row.tflops == pytest.approx(flops / (row.forward_ms * 1e-3) / 1e12)
    assert row.share == pytest.approx(row.tflops / row.matmul_tflops)
    assert row.difference < 1e-5
    assert "2 × 37" in capsys.readouterr().out


def test_the_products_are_those_that_torch_counts(model):
    batch = prefill._prompts(model, 2, 37)
    runner = prefill._runner(model, prefill.SdpaAttention(), batch)
    with FlopCounterMode(display=False) as counter:
        runner.forward(batch)
    counts = counter.get_flop_counts()["Global"]
    products = sum(
        n for op, n in counts.items() if "attention" not in str(op) and "bmm" not in str(op)
    )
    heads, layers, width = 4, 2, 16
    visible = 2 * 37 * 38 // 2  # of two sequences
    attention = 2 * 2 * visible * heads * width * layers
    assert prefill.flops(model.config, 2, 37) == products + attention


def test_wrong_logits_are_not_timed(model, monkeypatch):
    class Blind(prefill.SdpaAttention):
        def attend(self, *arguments):
            return super().attend(*arguments) * 0

    monkeypatch.setattr(prefill, "choose_attention", lambda shape, device: Blind())
    with pytest.raises(AssertionError, match="plain path"):
        prefill.measure(model, sequences=2, tokens=37, square=64)
