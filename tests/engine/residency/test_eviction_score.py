"""Eviction policies, recent uses, and reservations for pins."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet_engine.residency import eviction_score
from lorikeet_engine.residency.eviction_score import (
    HALF_LIFE_S,
    LeastRecentlyUsed,
    LeastUsedForItsSize,
    RecentUses,
    UsageRecord,
)
from lorikeet_engine.residency.reservations import MemoryReservations

NOW_S = 1000.0


def test_lru_evicts_the_adapter_whose_last_use_is_oldest():
    policy = LeastRecentlyUsed()
    assert policy.score(UsageRecord(9, 1.0, 400.0)) < policy.score(UsageRecord(1, 9.0, 500.0))


@pytest.mark.parametrize(
    ("first", "last"),
    [
        # rarely used before often used
        (UsageRecord(8, 1.0, NOW_S), UsageRecord(8, 5.0, NOW_S)),
        # large before small: its memory serves several small ones
        (UsageRecord(8, 3.0, NOW_S), UsageRecord(1, 3.0, NOW_S)),
        # but not if it is used that much more often: a small one is quicker to bring back
        (UsageRecord(1, 3.0, NOW_S), UsageRecord(8, 9.0, NOW_S)),
        # long idle before just used
        (UsageRecord(8, 2.0, NOW_S - 2 * HALF_LIFE_S), UsageRecord(8, 1.0, NOW_S)),
        # often used before just used
        (UsageRecord(8, 1.0, NOW_S), UsageRecord(8, 5.0, NOW_S - 2 * HALF_LIFE_S)),
    ],
)
def test_the_score_weighs_uses_size_and_age(first, last):
    policy = LeastUsedForItsSize()
    assert policy.score(first) < policy.score(last)


USES = st.builds(UsageRecord, st.integers(1, 10**9), st.floats(1.0, 1e3), st.floats(0.0, 1e3))


@given(USES, USES, st.floats(0.0, 1e3))
def test_scores_order_by_uses_over_the_root_of_size_at_any_later_time(one, two, later_s):
    def log_value(use: UsageRecord) -> float:
        idle_s = NOW_S + later_s - use.at_s
        return math.log2(use.uses * 2 ** (-idle_s / HALF_LIFE_S) / math.sqrt(use.elements))

    policy = LeastUsedForItsSize()
    score = policy.score(one) - policy.score(two)
    assert score == pytest.approx(log_value(one) - log_value(two), abs=1e-6)


def test_uses_are_halved_every_half_life():
    uses = RecentUses()
    for _ in range(3):
        uses.add("a", NOW_S)
    assert uses.count("a", NOW_S) == 3.0
    assert uses.count("a", NOW_S + HALF_LIFE_S) == 1.5
    uses.add("a", NOW_S + HALF_LIFE_S)
    assert uses.count("a", NOW_S + 2 * HALF_LIFE_S) == 1.25
    assert uses.count("b", NOW_S) == 0.0


def test_uses_of_the_least_recently_used_adapters_are_forgotten(monkeypatch):
    monkeypatch.setattr(eviction_score, "_MAX_REMEMBERED", 2)
    uses = RecentUses()
    for digest in "abac":
        uses.add(digest, NOW_S)
    assert [uses.count(digest, NOW_S) for digest in "abc"] == [2.0, 0.0, 1.0]


def test_reservations_leave_room_for_the_largest_adapter_asked_for():
    reservations = MemoryReservations(100)
    reservations.revoke_for(30)
    assert reservations.grant("a", 40)
    assert reservations.grant("b", 30)
    assert not reservations.grant("c", 1)
    assert reservations.grant("a", 40), "what is granted stays granted"


def test_a_request_revokes_the_newest_reservations():
    reservations = MemoryReservations(100)
    for digest in "abc":
        assert reservations.grant(digest, 30)
    reservations.revoke_for(60)
    assert [digest in reservations for digest in "abc"] == [True, False, False]
    assert not reservations.grant("b", 30)
