"""Counts of the overload benchmark, and its goals for quick and honest refusals."""

from dataclasses import replace

import pytest

from loadtest.bench_overload import (
    OverloadRow,
    Refusals,
    compared,
    meets_the_goals,
    refusals,
    tokens_between,
)
from loadtest.streamed_answer import LoadRequest, StreamedAnswer


def answered(at_s: float, *came: tuple[float, int], tokens: int = 10) -> StreamedAnswer:
    answer = StreamedAnswer(LoadRequest("m", 5, tokens, seed=0), at_s, at_s, failure="")
    answer.deltas_s, answer.events = [at_s for at_s, _ in came], [events for _, events in came]
    return answer


def refused(at_s: float, took_s: float, retry_after_s: float) -> StreamedAnswer:
    answer = StreamedAnswer(LoadRequest("m", 5, 10, seed=0), at_s, at_s, failure="503 overloaded")
    answer.ended_s, answer.retry_after_s = at_s + took_s, retry_after_s
    return answer


def test_tokens_count_at_their_arrival_even_if_an_event_has_several():
    whole = [answered(0.0, (1.0, 1), (2.0, 3), (9.0, 1)), answered(0.0, (1.5, 2), tokens=3)]
    assert tokens_between(whole, 1.5, 9.0) == pytest.approx(3 / 5 * 10 + 3)
    assert tokens_between(whole, 0.0, 10.0) == 13


def test_a_refusal_is_timed_and_its_retry_after_compared_with_later_requests():
    answers = [
        refused(0.0, 0.02, retry_after_s=1.0),
        answered(0.5),
        answered(1.03),
        refused(1.5, 0.04, retry_after_s=2.0),
        answered(2.01),
        answered(2.03),
    ]
    found = refusals(answers)
    assert (found.refused, found.retry_after) == (2, (1.0, 2.0))
    assert found.refusal_most == pytest.approx(40)
    assert found.refusal_p50 == pytest.approx(30)
    assert found.accepted_then == pytest.approx(
        2 / 3
    )  # no request came at the Retry-After of the second
    assert found.good
    assert refusals([answered(0.0)]) == Refusals(0, None, None, None, (), None)


@pytest.mark.parametrize(
    ("most_ms", "retry_after", "accepted_then"),
    [(101.0, (1.0,), 1.0), (20.0, (0.0, 1.0), 1.0), (20.0, (1.0,), 0.4)],
)
def test_slow_refusals_and_too_short_retry_afters_miss_the_goal(
    most_ms, retry_after, accepted_then
):
    assert not Refusals(9, 10.0, 20.0, most_ms, retry_after, accepted_then).good


@pytest.mark.parametrize(
    ("of_most", "broken", "met"),
    [((0.8, 1.0), 0, True), ((1.0, 0.9), 0, False), ((1, 1), 1, False)],
)
def test_rates_with_refusals_must_keep_tokens_and_break_no_request(of_most, broken, met):
    some = Refusals(9, 10.0, 20.0, 30.0, (1.0,), 0.7)
    few, many = (
        OverloadRow(rate, 9, 0, 1.0, share, 1.0, 1.0, found)
        for rate, share, found in zip((20.0, 30.0), of_most, (refusals([]), some), strict=True)
    )
    assert meets_the_goals([few, replace(many, broken=broken)]) is met
    assert not meets_the_goals([few])


def test_rates_are_compared_with_the_most_tokens_of_all():
    none = refusals([])
    rows = [OverloadRow(r, 9, 0, t, 1.0, 1.0, 1.0, none) for r, t in ((20.0, 80.0), (30.0, 100.0))]
    assert [row.of_most for row in compared(rows)] == [0.8, 1.0]
