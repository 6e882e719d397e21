"""Policy of the border: it follows swings of the traffic, and rests where nothing is gained."""

from collections import OrderedDict

import pytest

from lorikeet_engine.scheduling.border_policy import EVERY_S, BorderPolicy, Evicted

UNITS, LEAST = 128, 8
LOAD_S = 0.01  # of one unit's worth of adapters, or of one unit of prefixes


class Side:
    """A cache whose entries, each of one unit, are used in turn: the worst case of an LRU."""

    def __init__(self, units):
        self.held, self.evicted, self.next = OrderedDict(), Evicted(UNITS), 0
        self.units = units

    def use(self, distinct, times):
        """Use `distinct` entries in turn; return the seconds that more memory would save."""
        lost_s = 0.0
        for _ in range(times):
            key = str(self.next % distinct)
            self.next += 1
            if key in self.held:
                self.held.move_to_end(key)
            else:
                lost_s += LOAD_S * self.evicted.remove(key)
                self.held[key] = None
            self.fit()
        return lost_s

    def fit(self):
        while len(self.held) > self.units:
            self.evicted.add(self.held.popitem(last=False)[0], 1)


def swing(policy, adapters, pages, wanted, seconds):
    """Use both sides for some seconds and move the border as the policy says; return its places."""
    places = []
    for _ in range(int(seconds / EVERY_S)):
        lost = (side.use(most, 50) for side, most in zip((adapters, pages), wanted, strict=True))
        moved = policy.decide(*lost, EVERY_S)
        moved = max(LEAST - adapters.units, min(moved, pages.units - LEAST))
        adapters.units, pages.units = adapters.units + moved, pages.units - moved
        adapters.fit()
        pages.fit()
        places.append(adapters.units)
    return places


def test_the_border_follows_traffic_that_swings_every_minute():
    policy, adapters, pages = BorderPolicy(UNITS), Side(LEAST), Side(UNITS - LEAST)
    for _ in range(3):
        places = swing(policy, adapters, pages, (60, 20), 60)
        assert adapters.use(60, 60) == 0, "the adapters do not fit after a minute"
        assert pages.use(20, 20) == 0
        assert places.index(places[-1]) * EVERY_S < 15, "it takes too long"
        swing(policy, adapters, pages, (10, 100), 60)
        assert pages.use(100, 100) == 0, "the pages do not fit after a minute"
        assert adapters.use(10, 10) == 0


def test_the_border_rests_where_both_sides_fit_or_lose_alike():
    policy, adapters, pages = BorderPolicy(UNITS), Side(40), Side(88)
    assert set(swing(policy, adapters, pages, (40, 80), 30)) == {40}
    assert [policy.decide(0.1, 0.1, EVERY_S) for _ in range(100)] == [0] * 100


def test_a_short_burst_moves_little_and_a_long_one_faster_and_faster():
    policy = BorderPolicy(64 * 8)
    assert [policy.decide(0.2, 0.0, EVERY_S) for _ in range(6)] == [1, 2, 4, 8, 8, 8]
    assert policy.decide(0.0, 20.0, EVERY_S) == -1


def test_little_lost_time_moves_nothing():
    policy = BorderPolicy(UNITS)
    assert not any(policy.decide(EVERY_S / 1000, 0.0, EVERY_S) for _ in range(200))


def test_evictions_are_remembered_as_far_as_more_memory_would_reach():
    evicted = Evicted(3)
    for key in "abcd":
        evicted.add(key, 1)
    assert evicted.remove("a") == 0
    assert evicted.run("bcdx") == 3
    assert evicted.remove("c") == 1
    evicted.add("large", 4)
    assert [evicted.remove(key) for key in ("b", "d", "large")] == [0, 0, 0]


@pytest.mark.parametrize("direction", [1, -1])
def test_what_is_lost_on_both_sides_moves_memory_to_the_side_that_loses_more(direction):
    policy = BorderPolicy(UNITS)
    lost = (0.2, 0.05)[::direction]
    assert policy.decide(*lost, EVERY_S) == direction
