"""Scenarios under routers: run them, and show what came out."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from loadtest.simulator.baselines import ROUTERS
from loadtest.simulator.oracle import ORACLE, oracle
from loadtest.simulator.outcome import Outcome, summarize
from loadtest.simulator.scenario import Scenario
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet_engine.residency.eviction_score import (
    EvictionPolicy,
    LeastRecentlyUsed,
    LeastUsedForItsSize,
)

ALL_RESIDENT = "every GPU has all"
_OUR_EVICTION = ", our eviction"

Trial = tuple[Scenario, str]
"""A scenario and who routes: a name in ROUTERS, with ', our eviction' for that of the engine in
place of LRU, ORACLE, or ALL_RESIDENT: ours, with room for every adapter on every GPU."""


def measure(trial: Trial) -> Outcome:
    """Run one trial."""
    scenario, router = trial
    if router == ORACLE:
        return oracle(scenario)
    if router == ALL_RESIDENT:
        roomy = replace(scenario, gpu_room=1.0, rate_per_s=scenario.rate)
        return replace(measure((roomy, "lorikeet")), router=ALL_RESIDENT)
    name = router.removesuffix(_OUR_EVICTION)
    policy: EvictionPolicy = LeastRecentlyUsed()
    if name == "lorikeet" or name != router:
        policy = LeastUsedForItsSize()
    fleet = SimulatedFleet(
        scenario.setup(), scenario.requests(), ROUTERS[name](scenario.seed), policy
    )
    fleet.run()
    return summarize(router, fleet)


def measure_all(trials: Sequence[Trial], processes: int) -> Iterator[Outcome]:
    """Each trial's outcome, in their order."""
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(measure, trials)


def table(rows: Iterable[Sequence[str]], head: Sequence[str]) -> str:
    """Rows under a head as a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "router": lambda one: one.router,
    "hit rate": lambda one: f"{one.hit_rate:.1%}",
    "cold loads": lambda one: f"{one.cold_loads:,}",
    "loaded": lambda one: f"{one.loaded_gb:,.0f} GB",
    "TTFT p50": lambda one: _ms(one.ttft_p50_s),
    "p99": lambda one: _ms(one.ttft_p99_s),
    "max/mean load": lambda one: _ratio(one.balance),
    "worst minute": lambda one: _ratio(one.balance_worst_minute),
}


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{seconds * 1e3:,.0f} ms"


def _ratio(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"
