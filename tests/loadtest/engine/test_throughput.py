"""Throughput benchmark on a tiny model: it runs its works, and finds wrong tokens."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from loadtest.engine import harness, throughput
from loadtest.engine.offline import Work, generate
from loadtest.engine.random_adapters import Targets, random_layout, random_refs
from loadtest.engine.random_engine import random_engine
from loadtest.engine.random_model import CONFIGS, LLAMA_3_1_8B, shape_of
from lorikeet.simulator.workload_models import Zipf
from lorikeet_engine.adapter import Residency
from lorikeet_engine.parallel import followers
from lorikeet_engine.sampling.sampler import Sampler
from tests.engine import forked_followers
from tests.engine.conftest import MOE
from tests.engine.engine_driver import RecordingRunner
from tests.engine.tiny_engine import CONFIG, SETTINGS, tiny_engine

BASE = Work("base", 20, 6, requests=5)
WARM = Work("3 adapters", 20, 6, adapters=3, requests=5)
COLD = Work("cold", 20, 6, adapters=3, requests=5, cold=True)
ZIPF = Work("zipf", 20, 6, adapters=7, requests=12, popularity=Zipf(1.0), cold=True)


@pytest.fixture
def engine(tmp_path):
    engine = tiny_engine(tmp_path, adapters=7, room=3)
    yield engine
    engine.close()


def test_every_row_is_checked_and_timed(engine, capsys):
    works = [BASE, WARM, COLD, ZIPF]
    rows = throughput.measure_all(engine, works)
    base = rows[0].tokens_per_s[0]
    assert [row.work for row in rows] == works
    assert all(len(row.tokens_per_s) == 2 and min(row.tokens_per_s) > 0 for row in rows)
    assert all(row.step_ms > 0 and row.shortfall < 1e-4 for row in rows)
    for row in rows:
        pairs = zip(row.tokens_per_s, row.sampled_tokens_per_s, strict=True)
        assert row.of_greedy == pytest.approx(sum(b / a for a, b in pairs) / 2)
    assert [row.of_base for row in rows] == [row.tokens_per_s[0] / base for row in rows]
    printed = capsys.readouterr().out
    assert "3 adapters 20/6" in printed
    assert f"{rows[1].of_base:.4g}" in printed


def test_weights_in_fp8_with_scales_of_blocks_are_checked_and_timed(tmp_path):
    blocks = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    config = CONFIG | {"quantization_config": blocks}
    engine = random_engine(tmp_path, adapters=3, room=3, config=config, settings=SETTINGS)
    try:
        rows = throughput.measure_all(engine, [BASE, WARM])
        assert engine.info.quantization == "fp8"
        assert engine._runner.model._layers[0].mixer.o.weight.block == (32, 32)
        assert all(row.tokens_per_s[0] > 0 for row in rows)
    finally:
        engine.close()


def test_adapters_whose_experts_share_matrices_are_smaller_checked_and_timed(tmp_path):
    config = CONFIG | MOE["qwen3_moe"]
    kinds = Targets.LINEARS, Targets.SHARED_OUTER
    copied, shared = (random_layout(shape_of(config), 4, on) for on in kinds)
    assert shared.elements < copied.elements
    settings, others = replace(SETTINGS, max_batch_adapters=3), {Targets.SHARED_OUTER: 3}
    engine = random_engine(tmp_path, others=others, config=config, settings=settings)
    try:
        (row,) = throughput.measure_all(engine, [replace(WARM, on=Targets.SHARED_OUTER)], turns=1)
        assert row.tokens_per_s[0] > 0
    finally:
        engine.close()


def test_wrong_tokens_are_not_timed(engine, monkeypatch):
    monkeypatch.setattr(Sampler, "sample", lambda self, logits, *_: torch.argmin(logits, -1))
    with pytest.raises(AssertionError, match="plain path"):
        throughput.measure(engine, BASE)


def test_a_cold_run_begins_with_no_adapter_on_the_device(engine, monkeypatch):
    places = []

    def watched(engine, requests):
        places.append([engine.residency(ref) for ref in random_refs(3)])
        return generate(engine, requests)

    monkeypatch.setattr(throughput, "generate", watched)
    throughput.measure(engine, WARM)
    throughput.measure(engine, COLD)
    assert places[1:5] == [[Residency.GPU] * 3] * 4
    assert places[5:] == [[Residency.HOST] * 3] * 5


def test_greedy_and_sampled_runs_take_turns(engine, monkeypatch):
    temperatures = []

    def watched(engine, requests):
        temperatures.append({request.sampling.temperature for request in requests})
        return generate(engine, requests)

    monkeypatch.setattr(throughput, "generate", watched)
    throughput.measure(engine, BASE)
    assert temperatures == [{0.0}, {0.0}, {1.0}, {0.0}, {1.0}]


def test_work_drawn_again_hits_no_cached_prefix(engine):
    witness = RecordingRunner(engine)
    for _ in range(2):
        generate(engine, WARM.draw(256, 0))
    assert witness.tokens == 2 * 5 * (20 + 5)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tick_is_one_step_even_if_steps_overlap(tmp_path, overlap):
    engine = tiny_engine(tmp_path, settings=replace(SETTINGS, overlap=overlap))
    run = generate(engine, BASE.draw(256, 0)[:1])
    engine.close()
    assert len(run.answers[0].tokens) == len(run.ticks_s) == 6
    assert sum(run.steps_ms()) == pytest.approx(1e3 * (run.ticks_s[-1] - run.ticks_s[0]))


@pytest.mark.parametrize("weight_dtype", ["auto", "fp8"])
def test_rows_and_weights_are_chosen_by_name(tmp_path, monkeypatch, weight_dtype):
    def tiny(folder, *, config, settings, **arguments):
        assert config is LLAMA_3_1_8B
        settings = replace(SETTINGS, weight_dtype=settings.weight_dtype)
        return tiny_engine(folder, settings=settings, **arguments)

    monkeypatch.setattr(harness, "random_engine", tiny)
    monkeypatch.setattr(throughput, "WORKS", (BASE, WARM))
    out = tmp_path / "out.json"
    argv = ["throughput", "--json", str(out), "--room", "3", "--commit", "abc", "--rows", "3 *"]
    monkeypatch.setattr(sys, "argv", [*argv, "--weight-dtype", weight_dtype])
    throughput.main()
    results = json.loads(out.read_text())
    assert (results["commit"], results["weight_dtype"]) == ("abc", weight_dtype)
    assert [row["work"]["name"] for row in results["throughput"]] == ["3 adapters"]


SHRUNK = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("gemma-3-12b", {"sliding_window": 16}),  # with heads of 256, as they are
        ("phi-4", {"head_dim": 128}),
        ("qwen3-8b", {}),
    ],
)
def test_rows_of_other_models_are_checked(tmp_path, monkeypatch, name, kept):
    def shrunk(folder, *, config, settings, **arguments):
        assert config is CONFIGS[name]
        config = {**config, **SHRUNK, **kept}
        settings = replace(SETTINGS, max_context=64)
        return random_engine(folder, config=config, settings=settings, **arguments)

    monkeypatch.setattr(harness, "random_engine", shrunk)
    monkeypatch.setattr(throughput, "WORKS", (BASE, WARM))
    out = tmp_path / "out.json"
    argv = ["throughput", "--json", str(out), "--config", name, "--room", "3"]
    monkeypatch.setattr(sys, "argv", argv)
    throughput.main()
    base, warm = json.loads(out.read_text())["throughput"]
    assert max(base["shortfall"], warm["shortfall"]) < 1e-3


def test_adapters_that_the_host_has_no_room_for_are_on_all_gpus_from_the_start(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(followers, "_start", forked_followers.start)
    of_four = replace(SETTINGS, tensor_parallel=4)
    engine = tiny_engine(tmp_path, adapters=5, room=5, on_host=2, settings=of_four)
    one_part = engine._tiers.weights.arena.numel() // 5
    assert engine._tiers._host.elements == 2 * 4 * one_part
    assert {engine.residency(ref) for ref in random_refs(5)} == {Residency.GPU}
    row = throughput.measure(engine, Work("5 adapters", 20, 6, adapters=5, requests=5), turns=1)
    engine.close()
    assert len(row.tokens_per_s) == 1
    assert row.shortfall < 1e-4
