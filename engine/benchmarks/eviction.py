"""How often adapters are loaded, and how long requests wait for them, by eviction policy.

python -m engine.benchmarks.eviction --json eviction.json

No GPU: adapter_traffic simulates. docs/eviction.md has the result.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from engine.benchmarks import results
from engine.benchmarks.adapter_traffic import ELEMENT_BYTES, Requests, Simulation, Traffic
from lorikeet_engine.popularity import UNIFORM, Zipf
from lorikeet_engine.residency.eviction import (
    EvictionPolicy,
    LeastRecentlyUsed,
    LeastUsedForItsSize,
    Use,
)
from lorikeet_engine.residency.packing import PackedLayout
from lorikeet_engine.residency.residents import Residents
from lorikeet_engine.residency.slots import SlotPool

WARM_UP_S = 120.0  # not counted

_POPULARITIES = {
    "uniform": UNIFORM,
    "zipf 0.8": Zipf(0.8),
    "zipf 1.0": Zipf(1.0),
    "zipf 1.2": Zipf(1.2),
    "zipf 1.5": Zipf(1.5),
}
_MANY = partial(Traffic, adapters=10_000, rate_per_s=30.0, room=0.05, duration_s=420.0)
TRAFFIC = (
    *(Traffic(f"1,000, {name}", p) for name, p in _POPULARITIES.items()),
    Traffic("1,000, zipf 1.0, room for 5%", Zipf(1.0), room=0.05),
    Traffic("1,000, zipf 1.0, cv 2", Zipf(1.0), cv=2.0),
    Traffic("1,000, zipf 1.0, cv 4", Zipf(1.0), cv=4.0),
    Traffic("1,000, zipf 1.0, a noisy tenant", Zipf(1.0), noisy=True),
    *(_MANY(f"10,000, {name}", p) for name, p in _POPULARITIES.items()),
)


class Weighed:
    """Lowest uses / elements^exponent first: LeastUsedForItsSize has 0.5."""

    def __init__(self, exponent: float) -> None:
        self._correction = 0.5 - exponent

    def worth(self, use: Use) -> float:
        """See EvictionPolicy."""
        return LeastUsedForItsSize().worth(use) + self._correction * math.log2(use.elements)


class Chameleon(Residents):
    """Lowest 0.45 frequency + 0.10 recency + 0.45 size first (MICRO 2025).

    Each against the largest among the residents, so that all change when one does.
    """

    def make_room(self, elements: int, *, insist: bool) -> bool:
        """See Residents."""
        if self._residents and not self._pool.has_room(elements):
            self._weigh()
        return super().make_room(elements, insist=insist)

    def _weigh(self) -> None:
        now_s, all_ = self._clock(), self._residents.values()
        uses = [self._uses.at(resident.ref.digest, now_s) for resident in all_]
        idle_s = [now_s - resident.last_used_s for resident in all_]
        most, longest_s = max(uses) or 1.0, max(idle_s) or 1.0
        largest = max(resident.layout.elements for resident in all_)
        for resident, used, idle in zip(all_, uses, idle_s, strict=True):
            size = resident.layout.elements / largest
            resident.worth = 0.45 * used / most + 0.10 * (1 - idle / longest_s) + 0.45 * size
        self._by_worth = sorted((resident.worth, resident.ref.digest) for resident in all_)


class Clairvoyant(Residents):
    """The one that will be asked for last goes first (Belady): best, were all of one size."""

    def __init__(
        self, pool: SlotPool, transfer: Any, clock: Callable[[], float], requests: Requests
    ) -> None:
        super().__init__(pool, transfer, LeastRecentlyUsed(), clock)
        self._future: dict[str, list[float]] = defaultdict(list)
        for at_s, adapter in zip(requests.times_s, requests.adapters.tolist(), strict=True):
            self._future[str(adapter)].append(at_s)

    def _worth(self, digest: str, layout: PackedLayout, now_s: float) -> float:  # noqa: ARG002
        future = self._future[digest]
        after = bisect_right(future, now_s)
        return -future[after] if after < len(future) else -math.inf


def _under(policy: EvictionPolicy) -> Callable[..., Residents]:
    return lambda pool, transfer, clock, _: Residents(pool, transfer, policy, clock)


def _chameleon(pool: SlotPool, transfer: Any, clock: Callable[[], float], _: Any) -> Residents:
    return Chameleon(pool, transfer, LeastRecentlyUsed(), clock)


POLICIES: dict[str, Callable[..., Residents]] = {
    "LRU": _under(LeastRecentlyUsed()),
    "Chameleon": _chameleon,
    "uses": _under(Weighed(0.0)),
    "uses / size": _under(Weighed(1.0)),
    "uses / √size": _under(LeastUsedForItsSize()),
    "Belady": Clairvoyant,
}


@dataclass(frozen=True, slots=True)
class Row:
    """What requests saw, those of the warm-up left out.

    misses: the share that did not find its adapter on the GPU. The waits are those of all requests.
    """

    traffic: str
    policy: str
    requests: int
    misses: float
    loaded_gb: float
    mean_wait_ms: float
    p99_wait_ms: float


def measure(traffic: Traffic, policy: str) -> Row:
    """Run it, and count what comes after the warm-up."""
    simulation = Simulation(traffic, POLICIES[policy])
    simulation.run()
    counted = simulation.requests.times_s >= WARM_UP_S
    waits_ms = simulation.waits_s[counted] * 1e3
    loaded = sum(elements for at_s, elements in simulation.loads if at_s >= WARM_UP_S)
    return Row(
        traffic.name,
        policy,
        requests=int(counted.sum()),
        misses=float(counted[simulation.missed].sum() / counted.sum()),
        loaded_gb=loaded * ELEMENT_BYTES / 1e9,
        mean_wait_ms=float(waits_ms.mean()),
        p99_wait_ms=float(np.quantile(waits_ms, 0.99)),
    )


def table(rows: Sequence[Row], cell: Callable[[Row], str]) -> Iterator[str]:
    """Markdown: a line for each traffic, a column for each policy."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    yield f"| adapters, traffic | {' | '.join(policies)} |"
    yield "|---" * (len(policies) + 1) + "|"
    for name in dict.fromkeys(row.traffic for row in rows):
        yield f"| {name} | {' | '.join(cell(row) for row in rows if row.traffic == name)} |"


def main() -> None:
    """Print the tables; write every number."""
    options = results.arguments(__doc__).parse_args()
    rows = [measure(traffic, policy) for traffic in TRAFFIC for policy in POLICIES]
    facts: dict[str, Any] = {"commit": options.commit}
    results.write(options.json, facts, rows=[asdict(row) for row in rows])
    for cell in (
        lambda row: f"{row.misses:.1%}, {row.loaded_gb:,.0f} GB",
        lambda row: f"{row.mean_wait_ms:.1f}, {row.p99_wait_ms:.0f} ms",
    ):
        print(*table(rows, cell), "", sep="\n")


if __name__ == "__main__":
    main()
