"""Benchmark of long prompts on a tiny engine: its counts, with and without a goal."""

from dataclasses import replace

import pytest

from loadtest.engine import long_prompts
from loadtest.engine.long_prompts import LongPrompts
from loadtest.engine.offline import Work
from lorikeet_engine.sampling.sampler import Sampler
from tests.engine.tiny_engine import SETTINGS, tiny_engine

FEW = replace(SETTINGS, max_batch_tokens=64)
SMALL = LongPrompts("one by one", 3, 150, streams=2, stream_prompt=5, stream_tokens=200)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setattr(long_prompts, "CHECKED", Work("base", 20, 2, requests=2))
    engine = tiny_engine(tmp_path, adapters=2, room=2, settings=FEW)
    yield engine
    engine.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_every_prompt_and_every_gap_beside_it_is_counted(engine, at_once, capsys):
    rows = long_prompts.measure_all(engine, [replace(SMALL, at_once=at_once)])
    assert [row.goal_ms for row in rows] == [None, 40.0]
    for row in rows:
        assert row.done == 3
        p50, p99, longest = row.gaps_ms
        assert 0 < p50 <= p99 <= longest
        assert 0 <= row.over_step_ms < longest
    assert rows[1].of_no_goal == rows[1].prompt_tokens_per_s / rows[0].prompt_tokens_per_s
    assert engine.status().live.running == 0
    assert "3 × 150 one by one" in capsys.readouterr().out


def test_wrong_tokens_are_not_timed(engine, monkeypatch):
    monkeypatch.setattr(Sampler, "sample", lambda self, logits, *_: logits.argmin(-1))
    with pytest.raises(AssertionError, match="plain path"):
        long_prompts.measure_all(engine, [SMALL])
