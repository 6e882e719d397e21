"""Benchmark of predicted steps: its choice of steps, and its error."""

from dataclasses import replace

import pytest

from loadtest.engine import step_costs
from loadtest.engine.step_costs import Point, measure_all, worst
from lorikeet_engine.costs import RowsTime, StepCosts
from lorikeet_engine.sampling.sampler import Sampler
from tests.engine.tiny_engine import SETTINGS, tiny_engine

COSTS = StepCosts(
    (RowsTime(1, 1e-3), RowsTime(101, 2e-3)), seen_token_s=1e-6, prompt_seen_s=1e-7, pieces_s=0.0
)


@pytest.fixture(params=["auto", "fp8"])
def engine(request, tmp_path, monkeypatch):
    monkeypatch.setattr(step_costs, "CHECKED", step_costs.Work("base", 20, 2, requests=2))
    settings = replace(SETTINGS, kv_dtype=request.param)
    engine = tiny_engine(tmp_path, adapters=2, room=2, settings=settings)
    yield engine
    engine.close()


def test_a_prediction_follows_the_costs():
    both = Point(decodes=11, context=100, chunk=90, depth=1000)
    assert both.predicted_s(COSTS) == pytest.approx(2e-3 + 1.1e-3 + 1e-7 * 90 * 1045)
    assert both.label == "11 decodes of 100 and a chunk of 90 at 1,000"


def test_steps_that_fit_are_measured_and_the_worst_is_named(engine, capsys):
    points = [
        Point(4, 200),
        Point(chunk=30, depth=100),
        Point(2, 50, 20, 40),
        Point(1, 257),  # longer than a context
        Point(chunk=20, depth=250),
        Point(5, 50),  # more than run at once
    ]
    rows = measure_all(engine, points)
    assert [row.step for row in rows] == points[:3]
    for row in rows:
        assert row.predicted_ms == 1e3 * row.step.predicted_s(engine.info.step_costs)
        assert row.error == pytest.approx(row.predicted_ms / row.measured_ms - 1)
    assert abs(worst(rows).error) == max(abs(row.error) for row in rows)
    assert "4 decodes of 200" in capsys.readouterr().out


def test_enough_points_fit_into_fifty_gigabytes_of_pages():
    fitting = [point for point in step_costs.POINTS if point.kv_tokens <= 400_000]
    assert len(fitting) >= 30


def test_wrong_tokens_are_not_timed(engine, monkeypatch):
    monkeypatch.setattr(Sampler, "sample", lambda self, logits, *_: logits.argmin(-1))
    with pytest.raises(AssertionError, match="plain path"):
        measure_all(engine, [Point(1, 10)])
