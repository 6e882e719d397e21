"""The throughput benchmark on a tiny model: it makes what it says, and it notices wrong tokens."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from engine.benchmarks import harness, throughput
from engine.benchmarks.offline import Work, generate
from engine.benchmarks.random_adapters import random_refs
from engine.benchmarks.random_model import LLAMA_3_1_8B
from lorikeet_engine.adapter import Residency
from lorikeet_engine.sampling.sampler import Sampler
from lorikeet_engine.traffic import Zipf
from tests.engine.engine_driver import RecordingRunner
from tests.engine.tiny_engine import SETTINGS, tiny_engine

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


def test_greedy_runs_and_sampled_ones_take_turns(engine, monkeypatch):
    temperatures = []

    def watched(engine, requests):
        temperatures.append({request.sampling.temperature for request in requests})
        return generate(engine, requests)

    monkeypatch.setattr(throughput, "generate", watched)
    throughput.measure(engine, BASE)
    assert temperatures == [{0.0}, {0.0}, {1.0}, {0.0}, {1.0}]


def test_work_drawn_again_finds_nothing_in_the_prefix_cache(engine):
    witness = RecordingRunner(engine)
    for _ in range(2):
        generate(engine, WARM.draw(256, 0))
    assert witness.tokens == 2 * 5 * (20 + 5)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tick_is_one_step_however_they_overlap(tmp_path, overlap):
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
