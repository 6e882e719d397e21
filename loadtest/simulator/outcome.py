"""What a run came to, as numbers."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from loadtest.simulator.fleet import Fleet
from loadtest.simulator.oracle import oracle
from loadtest.simulator.routers import ROUTERS
from loadtest.simulator.traffic import Scenario
from lorikeet_engine.residency.eviction import (
    EvictionPolicy,
    LeastRecentlyUsed,
    LeastUsedForItsSize,
)

ORACLE = "oracle"
ALL_RESIDENT = "every GPU has all"
_OUR_EVICTION = ", our eviction"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the requests that arrived after the warm-up. Without balance and times for the oracle.

    hit_rate: share that found the adapter on the GPU, or needed none. cold_loads: onto GPUs.
    balance: the work of the busiest replica over the mean, in the worst minute; work is the time
    that prompts and tokens take in a full batch. ttft_p99_s and so on: to the first token.
    """

    router: str
    requests: int
    hit_rate: float
    cold_loads: int
    loaded_gb: float
    ttft_p50_s: float = math.nan
    ttft_p99_s: float = math.nan
    balance: float = math.nan
    balance_worst_minute: float = math.nan


Trial = tuple[Scenario, str]
"""A scenario and who routes: a name in ROUTERS, with ', our eviction' for that of the engine in
place of LRU, ORACLE, or ALL_RESIDENT: ours, with room for every adapter on every GPU."""


def measure(trial: Trial) -> Outcome:
    """Run it."""
    scenario, router = trial
    if router == ORACLE:
        best = oracle(scenario)
        counted = int((scenario.requests().times_s >= scenario.warm_up_s).sum())
        loaded_gb = best.loaded_bytes / 1e9
        return Outcome(ORACLE, counted, best.hit_rate, best.cold_loads, loaded_gb)
    if router == ALL_RESIDENT:
        roomy = replace(scenario, gpu_room=1.0, rate_per_s=scenario.rate)
        return replace(measure((roomy, "lorikeet")), router=ALL_RESIDENT)
    name = router.removesuffix(_OUR_EVICTION)
    policy: EvictionPolicy = LeastRecentlyUsed()
    if name == "lorikeet" or name != router:
        policy = LeastUsedForItsSize()
    fleet = Fleet(scenario, ROUTERS[name](scenario.seed), policy)
    fleet.run()
    return count(router, fleet)


def count(router: str, fleet: Fleet) -> Outcome:
    """The numbers of a fleet that has run."""
    scenario, times_s = fleet.scenario, fleet.requests.times_s
    counted = times_s >= scenario.warm_up_s
    p50_s, p99_s = np.quantile(fleet.ttft_s[counted], [0.5, 0.99])
    loads = [size for at_s, size in fleet.loads if at_s >= scenario.warm_up_s]
    minutes = times_s // 60.0
    whole = [counted & (minutes == minute) for minute in np.unique(minutes[counted])]
    return Outcome(
        router,
        requests=int(counted.sum()),
        hit_rate=float(fleet.hits[counted].mean()),
        cold_loads=len(loads),
        loaded_gb=sum(loads) / 1e9,
        ttft_p50_s=float(p50_s),
        ttft_p99_s=float(p99_s),
        balance=_balance(fleet, counted),
        balance_worst_minute=max(_balance(fleet, minute) for minute in whole),
    )


def measure_all(trials: Sequence[Trial], processes: int) -> Iterator[Outcome]:
    """Each trial's outcome, in their order."""
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(measure, trials)


def table(rows: Iterable[Sequence[str]], head: Sequence[str]) -> str:
    """Markdown."""
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


def _balance(fleet: Fleet, counted: np.ndarray) -> float:
    steps, requests = fleet.scenario.costs.steps, fleet.requests
    token_s = steps.decode_s(steps.max_running, 0) / steps.max_running
    work_s = requests.prompts[counted] * steps.prompt_token_s + requests.answers[counted] * token_s
    of_replica = np.bincount(fleet.served_by[counted], work_s, len(fleet.replicas))
    return float(of_replica.max() / of_replica.mean())


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{seconds * 1e3:,.0f} ms"


def _ratio(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"
