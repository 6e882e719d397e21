"""Benchmarks of compositions and of first tokens, on a tiny engine."""

import json
import sys
from dataclasses import replace

import pytest

from loadtest.engine import classification, compositions, first_tokens
from loadtest.engine.offline import Work
from loadtest.engine.random_adapters import Targets
from loadtest.engine.random_engine import roomy_engine
from lorikeet_engine.adapter import Composition
from lorikeet_engine.engine import Engine
from tests.engine.tiny_engine import CONFIG, SETTINGS, tiny_engine


def test_a_composition_is_timed_beside_an_adapter_of_the_same_number_of_ranks(
    tmp_path, monkeypatch, capsys
):
    asked = []

    def tiny(folder, source, on_gpu, on_host, config, settings, rank):
        settings = replace(SETTINGS, max_rank=rank, max_batch_adapters=settings.max_batch_adapters)
        return roomy_engine(folder, source, on_gpu, on_host, CONFIG, settings, rank=rank)

    def submit(self, request, _submit=Engine.submit):
        asked.append(request.adapter)
        _submit(self, request)

    monkeypatch.setattr(compositions, "roomy_engine", tiny)
    monkeypatch.setattr(compositions, "shape_of", lambda _, of=compositions.shape_of: of(CONFIG))
    monkeypatch.setattr(compositions, "WORKS", [Work("requests", 9, 20, requests=2)])
    monkeypatch.setattr(compositions, "STEPS", 3)
    monkeypatch.setattr(Engine, "submit", submit)
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["compositions", "--json", str(out)])
    compositions.main()
    (row,) = json.loads(out.read_text())["compositions"]
    assert row["ratio"] == pytest.approx(row["composed_ms"] / row["single_ms"])
    kinds = [type(each) for each in asked]
    assert kinds.count(Composition) == 2 * (1 + compositions.TURNS) == len(kinds) // 2
    composed = [each for each in asked if isinstance(each, Composition)]
    assert len({ref for each in composed for ref in each.members}) == 4
    assert "requests 9/20" in capsys.readouterr().out


def test_first_tokens_are_those_of_misses_hits_and_activated_adapters(tmp_path, monkeypatch):
    monkeypatch.setattr(first_tokens, "CACHED", 64)
    monkeypatch.setattr(first_tokens, "BASE", 96)
    monkeypatch.setattr(first_tokens, "SHORT", 20)
    monkeypatch.setattr(first_tokens, "STEPS", 3)
    monkeypatch.setattr(first_tokens, "TURNS", 1)
    hits = []
    engine = tiny_engine(tmp_path, adapters=2, room=2)

    def generate(engine, requests, _generate=first_tokens.generate):
        before = engine.status().cached_tokens
        run = _generate(engine, requests)
        hits.append(engine.status().cached_tokens - before)
        return run

    monkeypatch.setattr(first_tokens, "generate", generate)
    rows = list(first_tokens.measure(engine, long=100))
    engine.close()
    assert hits[:7] == [0, 64, 0, 64, 0, 0, 96]
    assert [row.ms > 0 for row in rows] == [True] * 7


def test_wrong_tokens_behind_a_cached_prefix_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(first_tokens, "CACHED", 64)
    engine = tiny_engine(tmp_path, adapters=2, room=2)
    monkeypatch.setattr(first_tokens.plain, "check", lambda *_: pytest.fail("checked"))
    with pytest.raises(pytest.fail.Exception, match="checked"):
        next(first_tokens.measure(engine, long=0))
    engine.close()


def test_classified_prompts_are_timed_beside_prompts_that_generate(tmp_path):
    engine = tiny_engine(tmp_path, adapters=2, room=2, others={Targets.CLASSES: 2})
    generates = Work("adapters", 24, 1, adapters=2, requests=6)
    classifies = replace(generates, on=Targets.CLASSES)
    (row,) = classification.measure_all(engine, [classifies, generates])
    engine.close()
    assert row.ratio == row.classified_per_s / row.generated_per_s
    assert row.off < 1e-4
