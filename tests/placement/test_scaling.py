"""When the fleet grows and shrinks: soon under pressure, late without, never back and forth."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.placement.pressure import ReplicaPressure
from lorikeet.placement.scaling import (
    ScalingDelays,
    Since,
    could_shrink,
    scale,
)

PACE = ScalingDelays()
PRESSED_S, CALM_S, MOVING_S = PACE.pressed_s, PACE.calm_s, PACE.moving_s
IDLE = ReplicaPressure(0, 100, 0.0, 0.0, 0.0, sole_copies=0)


def signals(
    working: float = 0,
    wait: float = 0,
    seats: float = 0,
    kv: float = 0,
    sole_copies: float | None = 0,
) -> ReplicaPressure:
    return ReplicaPressure(working, 100, wait, seats, kv, sole_copies)


class Fleet:
    """Ticks of 2 s; new replicas run after `start_s`, and bear what `load` says of their number."""

    def __init__(self, replicas: int, least: int = 1, most: int = 8, start_s: float = 20.0) -> None:
        self.target = self.running = replicas
        self._least, self._most, self._start_s = least, most, start_s
        self._ready: list[float] = []
        self._since = Since()
        self.now_s = 0.0
        self.targets = [replicas]

    def run(self, load: Callable[[int], ReplicaPressure], seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 2.0
            while self._ready and self._ready[0] <= self.now_s:
                del self._ready[0]
                self.running += 1
            said = [load(self.running)] * self.running
            verdict = scale(
                said,
                self.running,
                self.target,
                self._least,
                self._most,
                self._since,
                self.now_s,
                PACE,
            )
            self._since = verdict.since
            if verdict.replicas != self.target:
                assert verdict.reason
                self._ready += [self.now_s + self._start_s] * (verdict.replicas - self.target)
                self.running = min(self.running, verdict.replicas)
                self.target = verdict.replicas
                self.targets.append(self.target)


def shared(**volumes: float) -> Callable[[int], ReplicaPressure]:
    """A load that the replicas share."""
    return lambda running: signals(**{name: each / running for name, each in volumes.items()})


@pytest.mark.parametrize(
    ("load", "replicas"),
    [({"working": 350}, 4), ({"seats": 2.5}, 3), ({"kv": 4.0}, 5), ({"working": 1e9}, 8)],
)
def test_it_grows_to_what_bears_the_load_in_one_go(load, replicas: int):
    fleet = Fleet(2)
    fleet.run(shared(**load), PRESSED_S)
    assert fleet.targets == [2]
    fleet.run(shared(**load), 4)
    assert fleet.targets == [2, replicas]
    fleet.run(shared(**load), 200)
    assert fleet.targets == [2, replicas]


def test_a_moment_of_pressure_changes_nothing():
    fleet = Fleet(2)
    for _ in range(20):
        fleet.run(shared(seats=8), PRESSED_S - 2)
        fleet.run(shared(seats=1), 4)
    assert fleet.targets == [2]


def test_while_requests_wait_it_grows_by_one_at_a_time():
    fleet = Fleet(1)
    fleet.run(lambda _: signals(wait=3.0), PRESSED_S + 20)
    assert fleet.targets == [1, 2]
    fleet.run(lambda _: signals(wait=3.0), PRESSED_S)
    assert fleet.targets == [1, 2]  # the new one has only just begun to help
    fleet.run(lambda _: signals(wait=3.0), 10)
    assert fleet.targets == [1, 2, 3]


def test_one_replicas_queue_alone_is_no_pressure():
    said = [signals(wait=3.0), IDLE, IDLE, IDLE]
    verdict = scale(said, 4, 4, 1, 8, Since(pressed_s=0.0), PRESSED_S, PACE)
    assert verdict.replicas == 4
    assert verdict.since.pressed_s is None


def test_it_shrinks_one_by_one_after_minutes_of_calm():
    fleet = Fleet(4, least=2)
    fleet.run(shared(seats=0.2), CALM_S)
    assert fleet.targets == [4]
    fleet.run(shared(seats=0.2), 4)
    assert fleet.targets == [4, 3]
    fleet.run(shared(seats=0.2), 3 * CALM_S)
    assert fleet.targets == [4, 3, 2]


def test_one_busy_moment_begins_the_calm_anew():
    fleet = Fleet(3)
    for _ in range(4):
        fleet.run(shared(seats=0.2), CALM_S - 4)
        fleet.run(shared(seats=2.3), 2)
    assert fleet.targets == [3]


@pytest.mark.parametrize("sole_copies", [0.06, None])
def test_it_waits_for_second_copies_before_it_shrinks_but_not_for_ever(sole_copies: float | None):
    fleet = Fleet(3)
    fleet.run(lambda _: signals(sole_copies=sole_copies), CALM_S + MOVING_S)
    assert fleet.targets == [3]
    fleet.run(lambda _: signals(sole_copies=sole_copies), 4)
    assert fleet.targets == [3, 2]
    fleet = Fleet(3)
    fleet.run(lambda _: signals(sole_copies=sole_copies), CALM_S + 20)
    fleet.run(lambda _: signals(sole_copies=0.05), 2)
    assert fleet.targets == [3, 2]


def test_a_silent_or_starting_replica_is_no_calm():
    since = Since(calm_s=0.0)
    assert scale([IDLE] * 2, 3, 3, 1, 8, since, 1e6, PACE).replicas == 3
    assert scale([IDLE] * 2, 2, 3, 1, 8, since, 1e6, PACE).replicas == 3
    assert scale([], 3, 3, 1, 8, since, 1e6, PACE).replicas == 3
    assert scale([IDLE] * 3, 3, 3, 1, 8, since, 1e6, PACE).replicas == 2


@given(
    st.integers(2, 30),
    st.floats(0, 200),
    st.floats(0, 2),
    st.floats(0, 2),
    st.floats(0, 4),
)
def test_what_one_fewer_can_bear_never_grows_it_back(count, working, seats, kv, wait):
    before = [signals(working, wait, seats, kv)] * count
    if not could_shrink(before):
        return
    more = count / (count - 1)
    after = [signals(working * more, wait * more, seats * more, kv * more)] * (count - 1)
    verdict = scale(after, count - 1, count - 1, 1, 99, Since(pressed_s=0.0), PRESSED_S, PACE)
    assert verdict.since.pressed_s is None
