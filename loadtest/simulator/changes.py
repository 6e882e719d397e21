"""What a fleet does after a change, with placement and with routing alone."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from loadtest.simulator.goals import USUAL
from loadtest.simulator.placement import SimulatedPlacement
from loadtest.simulator.scenario import Scenario
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet.simulator.router import LeastCostRouter
from lorikeet_engine.residency.eviction_score import LeastUsedForItsSize

AT_S = 300.0
SEEDS = (1, 2, 3)
# Seconds after the change; the first is the two minutes before it.
WINDOWS = ((-120, 0), (0, 10), (10, 20), (20, 30), (30, 60), (60, 120))

# What is left when one of four dies must be able to do the work.
FLEETS = {
    "16 replicas": replace(USUAL, duration_s=AT_S + 120.0, reshuffle_s=1e9),
    "4 replicas, load 50%": replace(
        USUAL, replicas=4, load=0.5, duration_s=AT_S + 120.0, reshuffle_s=1e9
    ),
}
JOINS, DIES, RESHUFFLED = "a replica joins", "a replica dies", "others are popular"


@dataclass(frozen=True, slots=True)
class ChangeTimeline:
    """Means over the seeds, [windows]. joined: hits of the replica that joined, None without."""

    fleet: str
    event: str
    placement: bool
    hits: Sequence[float]
    joined: Sequence[float] | None
    ttft_p99_s: Sequence[float]
    loads_per_s: Sequence[float]


def timelines(processes: int) -> Iterator[ChangeTimeline]:
    """The timeline of each fleet and each change, with and without placement."""
    cases = [
        (fleet, event, placement)
        for fleet in FLEETS
        for event in (JOINS, DIES, RESHUFFLED)
        for placement in (False, True)
    ]
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(timeline, cases)


def timeline(case: tuple[str, str, bool]) -> ChangeTimeline:
    """Run a case, once for each seed. case: fleet, event, whether there is placement."""
    name, event, placement = case
    runs = [_run(replace(FLEETS[name], seed=seed), event, placement) for seed in SEEDS]

    def means(of: Callable[[SimulatedFleet, np.ndarray], float]) -> list[float]:
        each = [[of(fleet, window) for window in _windows(fleet)] for fleet in runs]
        return np.mean(each, axis=0).tolist()

    joined = means(_joined_hits) if event == JOINS else None
    loads = [_loads(fleet) for fleet in runs]
    return ChangeTimeline(
        name,
        event,
        placement,
        means(lambda fleet, window: float(fleet.hits[window].mean())),
        joined,
        means(lambda fleet, window: float(np.quantile(fleet.ttft_s[window], 0.99))),
        np.mean(loads, axis=0).tolist(),
    )


def _run(scenario: Scenario, event: str, placement: bool) -> SimulatedFleet:
    if event == RESHUFFLED:
        scenario = replace(scenario, reshuffle_s=AT_S)
    policy = LeastUsedForItsSize()
    fleet = SimulatedFleet(
        scenario.setup(), scenario.requests(), LeastCostRouter(scenario.seed), policy
    )
    if placement:
        SimulatedPlacement(fleet)
    if event == JOINS:
        fleet.schedule(AT_S, fleet.add_replica)
    if event == DIES:
        fleet.schedule(AT_S, lambda now_s: fleet.remove_replica(fleet.replicas[0], now_s))
    fleet.run()
    return fleet


def _windows(fleet: SimulatedFleet) -> Iterator[np.ndarray]:
    after_s = fleet.requests.times_s - AT_S
    for begin_s, end_s in WINDOWS:
        yield (after_s >= begin_s) & (after_s < end_s)


def _joined_hits(fleet: SimulatedFleet, window: np.ndarray) -> float:
    own = window & (fleet.served_by == fleet.setup.replicas)
    return float(fleet.hits[own].mean()) if own.any() else 0.0


def _loads(fleet: SimulatedFleet) -> list[float]:
    after_s = np.array([at_s for at_s, _ in fleet.loads]) - AT_S
    return [
        float(((after_s >= begin_s) & (after_s < end_s)).sum() / (end_s - begin_s))
        for begin_s, end_s in WINDOWS
    ]


def rows(timeline: ChangeTimeline) -> Iterator[list[str]]:
    """The table's rows of a timeline."""
    placed = "placement" if timeline.placement else "routing alone"
    head = [timeline.fleet, timeline.event, placed]
    yield [*head, "hits", *(f"{share:.1%}" for share in timeline.hits)]
    if timeline.joined is not None:
        yield [*head, "of the new one", "–", *(f"{share:.1%}" for share in timeline.joined[1:])]
    yield [*head, "p99 TTFT", *(f"{value * 1e3:,.0f} ms" for value in timeline.ttft_p99_s)]
    yield [*head, "loads a second", *(f"{value:.1f}" for value in timeline.loads_per_s)]


def columns() -> list[str]:
    """The table's head."""
    before, *after = WINDOWS
    shown = [f"{-before[0]} s before", *(f"{begin}–{end} s" for begin, end in after)]
    return ["", "", "", "", *shown]
