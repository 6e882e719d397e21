"""The fleet grows soon under pressure, shrinks late without, and never oscillates."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.placement.pressure import ReplicaPressure
from lorikeet.placement.scaling import (
    ScalingDelays,
    ScalingState,
    could_shrink,
    scale,
)

DELAYS = ScalingDelays()
UPSCALE_S, DOWNSCALE_S = DELAYS.upscale_s, DELAYS.downscale_s
SOLE_COPIES_S = DELAYS.sole_copies_s
IDLE = ReplicaPressure(0, 100, 0.0, 0.0, 0.0, sole_copies=0)


def pressure(
    working: float = 0,
    wait: float = 0,
    running: float = 0,
    kv: float = 0,
    sole_copies: float | None = 0,
) -> ReplicaPressure:
    return ReplicaPressure(working, 100, wait, running, kv, sole_copies)


class Fleet:
    """Ticks of 2 s. New replicas run after `start_s`; `load` maps their number to a pressure."""

    def __init__(self, replicas: int, least: int = 1, most: int = 8, start_s: float = 20.0) -> None:
        self.target = self.running = replicas
        self._least, self._most, self._start_s = least, most, start_s
        self._ready: list[float] = []
        self._state = ScalingState()
        self.now_s = 0.0
        self.targets = [replicas]

    def run(self, load: Callable[[int], ReplicaPressure], seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 2.0
            while self._ready and self._ready[0] <= self.now_s:
                del self._ready[0]
                self.running += 1
            pressures = [load(self.running)] * self.running
            decision = scale(
                pressures,
                self.running,
                self.target,
                self._least,
                self._most,
                self._state,
                self.now_s,
                DELAYS,
            )
            self._state = decision.state
            if decision.replicas != self.target:
                assert decision.reason
                self._ready += [self.now_s + self._start_s] * (decision.replicas - self.target)
                self.running = min(self.running, decision.replicas)
                self.target = decision.replicas
                self.targets.append(self.target)


def shared(**volumes: float) -> Callable[[int], ReplicaPressure]:
    """Load that the replicas share."""
    return lambda running: pressure(**{name: each / running for name, each in volumes.items()})


@pytest.mark.parametrize(
    ("load", "replicas"),
    [({"working": 350}, 4), ({"running": 2.5}, 3), ({"kv": 4.0}, 5), ({"working": 1e9}, 8)],
)
def test_the_fleet_grows_in_one_step_to_the_replicas_that_the_load_needs(load, replicas: int):
    fleet = Fleet(2)
    fleet.run(shared(**load), UPSCALE_S)
    assert fleet.targets == [2]
    fleet.run(shared(**load), 4)
    assert fleet.targets == [2, replicas]
    fleet.run(shared(**load), 200)
    assert fleet.targets == [2, replicas]


def test_a_moment_of_pressure_changes_nothing():
    fleet = Fleet(2)
    for _ in range(20):
        fleet.run(shared(running=8), UPSCALE_S - 2)
        fleet.run(shared(running=1), 4)
    assert fleet.targets == [2]


def test_while_requests_wait_the_fleet_grows_one_by_one():
    fleet = Fleet(1)
    fleet.run(lambda _: pressure(wait=3.0), UPSCALE_S + 20)
    assert fleet.targets == [1, 2]
    fleet.run(lambda _: pressure(wait=3.0), UPSCALE_S)
    assert fleet.targets == [1, 2]  # the new one has only just begun to help
    fleet.run(lambda _: pressure(wait=3.0), 10)
    assert fleet.targets == [1, 2, 3]


def test_one_replicas_queue_alone_is_no_pressure():
    pressures = [pressure(wait=3.0), IDLE, IDLE, IDLE]
    decision = scale(pressures, 4, 4, 1, 8, ScalingState(pressed_since_s=0.0), UPSCALE_S, DELAYS)
    assert decision.replicas == 4
    assert decision.state.pressed_since_s is None


def test_the_fleet_shrinks_one_by_one_after_minutes_of_calm():
    fleet = Fleet(4, least=2)
    fleet.run(shared(running=0.2), DOWNSCALE_S)
    assert fleet.targets == [4]
    fleet.run(shared(running=0.2), 4)
    assert fleet.targets == [4, 3]
    fleet.run(shared(running=0.2), 3 * DOWNSCALE_S)
    assert fleet.targets == [4, 3, 2]


def test_one_busy_moment_restarts_the_calm():
    fleet = Fleet(3)
    for _ in range(4):
        fleet.run(shared(running=0.2), DOWNSCALE_S - 4)
        fleet.run(shared(running=2.3), 2)
    assert fleet.targets == [3]


@pytest.mark.parametrize("sole_copies", [0.06, None])
def test_the_fleet_waits_for_second_copies_before_it_shrinks_but_not_for_ever(
    sole_copies: float | None,
):
    fleet = Fleet(3)
    fleet.run(lambda _: pressure(sole_copies=sole_copies), DOWNSCALE_S + SOLE_COPIES_S)
    assert fleet.targets == [3]
    fleet.run(lambda _: pressure(sole_copies=sole_copies), 4)
    assert fleet.targets == [3, 2]
    fleet = Fleet(3)
    fleet.run(lambda _: pressure(sole_copies=sole_copies), DOWNSCALE_S + 20)
    fleet.run(lambda _: pressure(sole_copies=0.05), 2)
    assert fleet.targets == [3, 2]


def test_a_silent_or_starting_replica_prevents_calm():
    since = ScalingState(calm_since_s=0.0)
    assert scale([IDLE] * 2, 3, 3, 1, 8, since, 1e6, DELAYS).replicas == 3
    assert scale([IDLE] * 2, 2, 3, 1, 8, since, 1e6, DELAYS).replicas == 3
    assert scale([], 3, 3, 1, 8, since, 1e6, DELAYS).replicas == 3
    assert scale([IDLE] * 3, 3, 3, 1, 8, since, 1e6, DELAYS).replicas == 2


@given(
    st.integers(2, 30),
    st.floats(0, 200),
    st.floats(0, 2),
    st.floats(0, 2),
    st.floats(0, 4),
)
def test_a_fleet_that_has_shrunk_does_not_grow_again_under_the_same_load(
    count, working, running, kv, wait
):
    before = [pressure(working, wait, running, kv)] * count
    if not could_shrink(before):
        return
    more = count / (count - 1)
    after = [pressure(working * more, wait * more, running * more, kv * more)] * (count - 1)
    decision = scale(
        after, count - 1, count - 1, 1, 99, ScalingState(pressed_since_s=0.0), UPSCALE_S, DELAYS
    )
    assert decision.state.pressed_since_s is None
