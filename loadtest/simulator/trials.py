"""Runs of a scenario under one router, and the columns that show their outcomes."""

import math
from collections.abc import Callable, Iterable, Sequence

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


def measure(scenario: Scenario, router: str) -> Outcome:
    """Run a scenario.

    router: ORACLE or a name in ROUTERS. The product's router evicts by the product's own policy,
    the others evict what was used least recently.
    """
    if router == ORACLE:
        return oracle(scenario)
    ours = router == "lorikeet"
    policy: EvictionPolicy = LeastUsedForItsSize() if ours else LeastRecentlyUsed()
    fleet = SimulatedFleet(
        scenario.setup(), scenario.requests(), ROUTERS[router](scenario.seed), policy
    )
    fleet.run()
    return summarize(router, fleet)


def table(rows: Iterable[Sequence[str]], head: Sequence[str]) -> str:
    """Format rows under a head as a Markdown table."""
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
