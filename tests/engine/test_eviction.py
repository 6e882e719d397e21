"""Which adapter goes first."""

import pytest

from lorikeet_engine.residency.eviction import (
    HALF_LIFE_S,
    Candidate,
    CostAware,
    LeastRecentlyUsed,
)
from lorikeet_engine.residency.pledges import Pledges

NOW = 1000.0


def order(policy, *candidates):
    return [c.digest for c in policy.order(candidates, NOW)]


def test_lru_evicts_what_was_used_longest_ago():
    candidates = [Candidate("b", 1, 9.0, 500.0), Candidate("a", 9, 0.0, 400.0)]
    assert order(LeastRecentlyUsed(), *candidates) == ["a", "b"]


@pytest.mark.parametrize(
    ("first", "last"),
    [
        # rarely used before often used
        (Candidate("first", 8, 1.0, 900.0), Candidate("last", 8, 5.0, 900.0)),
        # small before large: a large one costs more to bring back
        (Candidate("first", 1, 3.0, 900.0), Candidate("last", 8, 3.0, 900.0)),
        # long idle before just used
        (Candidate("first", 8, 0.0, 100.0), Candidate("last", 8, 0.0, 900.0)),
        # frequency outweighs recency
        (Candidate("first", 8, 1.0, 990.0), Candidate("last", 8, 3.0, 900.0)),
        # never used and nothing known
        (Candidate("first", 1, 0.0, NOW), Candidate("last", 2, 0.0, NOW)),
    ],
)
def test_cost_aware_weighs_frequency_size_and_recency(first, last):
    assert order(CostAware(), last, first) == ["first", "last"]
    assert order(CostAware(), first, last) == ["first", "last"]


def test_the_score_is_the_published_sum():
    # 0.45·1 + 0.10·0 + 0.45·½ = 0.675 against 0.45·½ + 0.10·1 + 0.45·½ = 0.55 (frequency halved)
    often = Candidate("often", 4, 4.0, NOW - HALF_LIFE_S)  # 4 uses, one half-life ago: 2
    recent = Candidate("recent", 4, 1.0, NOW)
    large = Candidate("large", 8, 1.2, NOW)  # 0.45·0.6 + 0.10 + 0.45 = 0.82
    assert order(CostAware(), often, recent, large) == ["recent", "often", "large"]


@pytest.mark.parametrize("policy", [CostAware(), LeastRecentlyUsed()])
def test_every_candidate_is_ordered_once(policy):
    candidates = [Candidate(str(n), n % 3 + 1, n % 2, NOW - n) for n in range(20)]
    assert sorted(order(policy, *candidates)) == sorted(c.digest for c in candidates)
    assert order(policy) == []


def test_pledges_leave_room_for_the_largest_adapter_asked_for():
    pledges = Pledges(100)
    pledges.yield_to(30)
    assert pledges.grant("a", 40)
    assert pledges.grant("b", 30)
    assert not pledges.grant("c", 1)
    assert pledges.grant("a", 40), "what is granted stays granted"


def test_a_request_takes_the_newest_pledges_back():
    pledges = Pledges(100)
    for digest in "abc":
        assert pledges.grant(digest, 30)
    pledges.yield_to(60)
    assert [digest in pledges for digest in "abc"] == [True, False, False]
    assert not pledges.grant("b", 30)
