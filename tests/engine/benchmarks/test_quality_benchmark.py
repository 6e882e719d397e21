"""The quality benchmark on a tiny model: its truth is the engine's, and rounding is seen."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from engine.benchmarks import harness, quality
from engine.benchmarks.quality import Sums, measure
from engine.benchmarks.random_model import LLAMA_3_1_8B
from tests.engine.tiny_engine import SETTINGS

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIG = LLAMA_3_1_8B | SIZES | {"num_hidden_layers": 3}
BF16 = replace(SETTINGS, dtype="bfloat16", adapter_dtype="bfloat16", max_context=128)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    torch.set_num_threads(1)
    sizes = {"SEQUENCES": 5, "PROMPT": 21, "DECODES": 4, "ADAPTERS": 3}
    for name, value in sizes.items():
        monkeypatch.setattr(quality, name, value)
    monkeypatch.setattr(harness, "empty_device", lambda: None)


def test_the_truth_is_what_the_engine_computes_in_float32(tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "KV_DTYPES", {"auto": ("auto",)})
    exact = replace(BF16, dtype="float32", adapter_dtype="float32")
    rows = list(measure(tmp_path, exact, CONFIG))
    assert [(row.adapters, row.steps, row.positions) for row in rows] == [
        (0, "prompts", 105),
        (0, "decodes", 20),
        (3, "prompts", 105),
        (3, "decodes", 20),
    ]
    assert all(row.error < 1e-5 and row.same_token == 1 for row in rows)


def test_rounding_is_seen_beside_bfloat16s_own(tmp_path):
    rows = list(measure(tmp_path, BF16, CONFIG))
    assert len(rows) == 5 * 2 * 2
    errors = {(r.weights, r.kv, r.adapters, r.steps): r for r in rows}
    for adapters in (0, 3):
        for steps in ("prompts", "decodes"):
            own, kv, weights, both, nf4 = (
                errors[weights, kv, adapters, steps]
                for weights, kv in (
                    *(("bf16", "bf16"), ("bf16", "fp8")),
                    *(("fp8", "bf16"), ("fp8", "fp8"), ("nf4", "bf16")),
                )
            )
            assert own.of_bf16 == 1
            assert 0 < own.error < kv.error < weights.error < nf4.error
            assert weights.error < both.error < nf4.error
            assert both.of_bf16 == both.error / own.error
            assert nf4.same_token < own.same_token <= 1


def test_where_adapters_are_left_out_bfloat16_is_no_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "random_scaling", lambda _: 0.0)
    with pytest.raises(AssertionError, match="bfloat16's own error"):
        list(measure(tmp_path, BF16, CONFIG))


def test_errors_are_shares_over_all_positions():
    sums, truth = Sums(), torch.tensor([[3.0, 4.0], [5.0, 0.0]])
    for row in truth:
        sums.add(row[None] + torch.tensor([0.6, -0.8]), row[None])
    sums.add(torch.tensor([[5.0, 0.0]]), torch.tensor([[0.0, 5.0]]))
    assert sums.positions == 3
    assert sums.same == 1
    assert sums.error == pytest.approx(((1 + 1 + 50) / 75) ** 0.5)


def test_main_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quality, "SETTINGS", BF16)
    monkeypatch.setattr(quality, "LLAMA_3_1_8B", CONFIG)
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["quality", "--json", str(out), "--layers", "2"])
    quality.main()
    written = json.loads(out.read_text())
    assert written["layers"] == 2
    assert len(written["quality"]) == 20
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["weights", "kv", "adapters"]
