"""Forecast of latencies and hit rates of N replicas under a demand, compared with goals."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lorikeet.routing.ranking import H200_LLAMA_8B, CostCoefficients
from lorikeet.simulator.demand import SimulatedDemand
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet.simulator.traffic import BASE_MODEL, KV_TOKEN_BYTES, FleetSetup
from lorikeet.simulator.workload_models import Floats, Ints
from lorikeet_engine.adapter import Residency

WARM_UP_S = 60.0
# Bounds of one run, which takes a second or two: requests, simulated seconds, and requests of each
# tenant with a goal.
_REQUESTS, _SHORTEST_S, _USUAL_S, _LONGEST_S, _REQUESTS_OF_TENANT = 25_000, 60.0, 180.0, 3600.0, 100
_BACKLOG_S = 5.0  # a fleet keeps up if all first tokens come this soon after the last request
_NAMES = {
    "ttft_p99_s": "p99 to the first token",
    "inter_token_p50_s": "p50 between tokens",
    "inter_token_p99_s": "p99 between tokens",
    "hit_rate": "found on the GPU",
}


@dataclass(frozen=True, slots=True)
class CapacityGoals:
    """Goals for all requests together; None: no goal.

    hit_rate: least fraction of requests that find their adapter on the GPU or need none. The other
        goals are upper limits.
    """

    ttft_p99_s: float | None = None
    inter_token_p50_s: float | None = None
    inter_token_p99_s: float | None = None
    hit_rate: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Memory of a replica for adapters and for requests, counted per GPU.

    gpu_bytes: memory of each GPU.
    host_bytes, disk_bytes: host memory and disk space of the replica, divided by its number of
        GPUs.
    gpus: number of GPUs of the replica.
    kv_tokens: tokens of prompts and answers that the replica's KV cache holds at once.
    kv_host_bytes: host memory of the replica for KV pages, divided by its number of GPUs.
    kv_token_bytes: bytes of a token's keys and values on one GPU.
    """

    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    gpus: int = 1
    kv_tokens: float = math.inf
    kv_host_bytes: int = 0
    kv_token_bytes: int = KV_TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class CapacityNeeds:
    """A demand, the memory and costs of each replica, and the goals to meet."""

    demand: SimulatedDemand
    memory: ReplicaMemory
    goals: CapacityGoals
    costs: CostCoefficients = H200_LLAMA_8B

    @property
    def counted_s(self) -> float:
        """Simulated seconds of one run after the warm-up: more for tenants with goals and few
        requests, as long as the run stays quick.
        """
        rates = [one.rate_per_s for one in self.demand.tenants if one.ttft_p99_s is not None]
        wanted_s = max(_USUAL_S, _REQUESTS_OF_TENANT / min([self.demand.rate_per_s, *rates]))
        quick_s = max(_SHORTEST_S, _REQUESTS / self.demand.rate_per_s)
        return min(wanted_s, quick_s, _LONGEST_S)


@dataclass(frozen=True, slots=True)
class TtftSummary:
    """Time to the first token of some requests; NaN if there are none.

    requests: number of the requests.
    hit_p99_s: p99 of the requests that found their adapter on the GPU, or need none.
    hit_rate: fraction of these requests among all.
    """

    requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    hit_p99_s: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class GoalCheck:
    """A goal, and the forecast of the same quantity.

    what: name of the goal, a field of CapacityGoals.
    wanted: value of the goal.
    expected: forecast value.
    tenant: the tenant with the goal; None: all requests.
    """

    what: str
    wanted: float
    expected: float
    tenant: str | None = None

    @property
    def met(self) -> bool:
        """Whether the goal is met; False if there are no requests to judge by."""
        if self.what == "hit_rate":
            return self.expected >= self.wanted
        return self.expected <= self.wanted

    @property
    def name(self) -> str:
        """Name of the goal, to print."""
        return _NAMES[self.what]

    def shown(self, value: float) -> str:
        """Format a value of the goal's quantity with its unit."""
        if self.what == "hit_rate":
            return f"{value:.1%}"
        return f"{value * 1e3:,.1f} ms" if value < 0.1 else f"{value * 1e3:,.0f} ms"

    @property
    def text(self) -> str:
        """The check in words: p99 to the first token 612 ms (want ≤ 500 ms)."""
        whose = "" if self.tenant is None else f"{self.tenant}: "
        sign = "≥" if self.what == "hit_rate" else "≤"
        expected, wanted = self.shown(self.expected), self.shown(self.wanted)
        return f"{whose}{self.name} {expected} (want {sign} {wanted})"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected service of a number of replicas.

    pins: tenant → number of replicas that keep its adapters.
    all: summary of all requests.
    tenants: summaries by tenant's name.
    found: fraction of requests by the tier where their adapter was when they came.
    cold_loads_per_min: loads of adapters onto GPUs per minute, in the whole fleet.
    pinned_bytes: bytes of pinned adapters on the replica that has most of them.
    keeps_up: whether no run ended with a long queue.
    """

    replicas: int
    pins: Mapping[str, int]
    all: TtftSummary
    tenants: Mapping[str, TtftSummary]
    inter_token_p50_s: float
    inter_token_p99_s: float
    found: Mapping[Residency, float]
    cold_loads_per_min: float
    pinned_bytes: int
    keeps_up: bool
    checks: Sequence[GoalCheck]

    @property
    def missed(self) -> list[GoalCheck]:
        """Checks of the goals that are missed."""
        return [check for check in self.checks if not check.met]

    @property
    def met(self) -> bool:
        """Whether the fleet meets all goals, and keeps up."""
        return self.keeps_up and not self.missed


def forecast(
    needs: CapacityNeeds, replicas: int, pins: Mapping[str, int], seeds: Sequence[int]
) -> Forecast:
    """Simulate a fleet once for each seed, and summarise all runs together.

    pins: tenant → number of replicas that keep its adapters.
    """
    demand = needs.demand
    fleets = [_run(needs, replicas, pins, seed) for seed in seeds]
    ttft_s, found, tenants = (
        np.concatenate(parts) for parts in zip(*(_counted(demand, f) for f in fleets), strict=True)
    )
    whole = _tail(ttft_s, found)
    named = enumerate(demand.tenants)
    tails = {one.name: _tail(ttft_s[tenants == n], found[tenants == n]) for n, one in named}
    p50_s, p99_s = _gaps(fleets)
    loads = sum(fleet.loads for fleet in fleets)
    return Forecast(
        replicas,
        pins,
        whole,
        tails,
        p50_s,
        p99_s,
        found={tier: float((found == tier).mean()) for tier in sorted(Residency, reverse=True)},
        cold_loads_per_min=loads / len(seeds) / needs.counted_s * 60.0,
        pinned_bytes=max(one.arena.pinned_bytes for fleet in fleets for one in fleet.replicas),
        keeps_up=all(_keeps_up(fleet) for fleet in fleets),
        checks=list(_checks(needs, whole, tails, (p50_s, p99_s))),
    )


def _run(needs: CapacityNeeds, replicas: int, pins: Mapping[str, int], seed: int) -> SimulatedFleet:
    demand, memory = needs.demand, needs.memory
    copies = np.array([pins.get(tenant.name, 0) for tenant in demand.tenants])[demand.tenant_of]
    setup = FleetSetup(
        replicas=replicas,
        ranks=demand.ranks,
        sizes=demand.sizes,
        gpu_bytes=memory.gpu_bytes,
        host_bytes=memory.host_bytes,
        disk_bytes=memory.disk_bytes,
        kv_tokens=memory.kv_tokens,
        system_tokens=demand.system_tokens,
        kv_host_tokens=memory.kv_host_bytes // memory.kv_token_bytes,
        kv_token_bytes=memory.kv_token_bytes,
        pins={adapter: int(copies[adapter]) for adapter in np.flatnonzero(copies).tolist()},
        drafting=demand.drafting,
        warm_up_s=WARM_UP_S,
        seed=seed,
        costs=needs.costs,
    )
    requests = demand.requests(WARM_UP_S + needs.counted_s, seed)
    fleet = SimulatedFleet(setup, requests)
    fleet.run()
    return fleet


def _counted(demand: SimulatedDemand, fleet: SimulatedFleet) -> tuple[Floats, Ints, Ints]:
    """Return, for each request after the warm-up, seconds to first token, tier and tenant.

    The tier is where the request found its adapter; the tenant is BASE_MODEL without an adapter.
    """
    late = fleet.requests.times_s >= WARM_UP_S
    adapters = fleet.requests.adapters[late]
    tenants = np.where(adapters == BASE_MODEL, BASE_MODEL, demand.tenant_of[adapters])
    return fleet.ttft_s[late], fleet.found[late], tenants


def _tail(ttft_s: Floats, found: Ints) -> TtftSummary:
    hits = found == Residency.GPU
    return TtftSummary(
        len(ttft_s),
        _quantile(ttft_s, 0.5),
        _quantile(ttft_s, 0.99),
        _quantile(ttft_s[hits], 0.99),
        float(hits.mean()) if len(hits) else math.nan,
    )


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else math.nan


def _gaps(fleets: Sequence[SimulatedFleet]) -> tuple[float, float]:
    """Return p50 and p99 of the time between tokens in seconds; NaN if no answer has two tokens."""
    tokens: Counter[int] = Counter()
    for fleet in fleets:
        tokens.update(fleet.gaps)
    lengths = sorted(tokens)
    shares = np.cumsum([tokens[length] for length in lengths])
    if not lengths:
        return math.nan, math.nan
    p50, p99 = (lengths[int(np.searchsorted(shares, q * shares[-1]))] for q in (0.5, 0.99))
    return p50 * 1e-4, p99 * 1e-4


def _keeps_up(fleet: SimulatedFleet) -> bool:
    """Whether all first tokens came at most _BACKLOG_S seconds after the last request."""
    times_s = fleet.requests.times_s
    return float((times_s + fleet.ttft_s).max() - times_s[-1]) <= _BACKLOG_S


def _checks(
    needs: CapacityNeeds,
    whole: TtftSummary,
    tenants: Mapping[str, TtftSummary],
    gaps: tuple[float, float],
) -> Iterator[GoalCheck]:
    goals = needs.goals
    of_all = (
        ("ttft_p99_s", goals.ttft_p99_s, whole.ttft_p99_s),
        ("inter_token_p50_s", goals.inter_token_p50_s, gaps[0]),
        ("inter_token_p99_s", goals.inter_token_p99_s, gaps[1]),
        ("hit_rate", goals.hit_rate, whole.hit_rate),
    )
    for what, wanted, expected in of_all:
        if wanted is not None:
            yield GoalCheck(what, wanted, expected)
    for tenant in needs.demand.tenants:
        if tenant.ttft_p99_s is not None:
            expected = tenants[tenant.name].ttft_p99_s
            yield GoalCheck("ttft_p99_s", tenant.ttft_p99_s, expected, tenant.name)
