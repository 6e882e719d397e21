"""Prefill benchmark: operations equal torch's count, and tokens are checked by the plain path."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from loadtest.engine import plain, prefill
from loadtest.engine.offline import Work, generate
from lorikeet_engine.sampling.sampler import Sampler
from tests.engine.tiny_engine import tiny_engine

BASE = Work("base", 37, 1, requests=2)
WITH_ADAPTERS = Work("2 adapters", 37, 1, adapters=2, requests=2)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setattr(prefill, "SQUARE", 64)
    engine = tiny_engine(tmp_path, adapters=2, room=2)
    yield engine
    engine.close()


def test_the_rate_is_operations_over_time(engine, capsys):
    rows = prefill.measure_all(engine, [BASE, WITH_ADAPTERS])
    flops = prefill.flops(engine._runner.model.config, 2, 37)
    for row in rows:
        assert row.tflops == pytest.approx(flops / (row.step_ms * 1e-3) / 1e12)
        assert row.share == pytest.approx(row.tflops / row.matmul_tflops)
        assert row.shortfall < 1e-5
    assert "2 adapters 37/1" in capsys.readouterr().out


def test_the_operations_equal_torchs_count(engine):
    answers = generate(engine, BASE.draw(256, 0)).answers
    with FlopCounterMode(display=False) as counter:
        plain.plain_logits(engine._runner.model, engine._tiers, answers)
    counts = counter.get_flop_counts()["Global"]
    products = sum(
        n for op, n in counts.items() if "attention" not in str(op) and "bmm" not in str(op)
    )
    heads, layers, width = 4, 2, 16
    visible = 2 * 37 * 38 // 2  # two sequences
    attention = 2 * 2 * visible * heads * width * layers
    assert prefill.flops(engine._runner.model.config, 2, 37) == products + attention


def test_wrong_tokens_are_not_timed(engine, monkeypatch):
    monkeypatch.setattr(Sampler, "sample", lambda self, logits, *_: torch.argmin(logits, -1))
    with pytest.raises(AssertionError, match="plain path"):
        prefill.measure(engine, BASE)


def test_prompts_that_take_several_steps_are_refused(engine):
    with pytest.raises(AssertionError, match="steps"):
        prefill.measure(engine, Work("base", 37, 1, requests=5))  # four run at once
