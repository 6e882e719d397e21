"""The engine's default eviction policy under traffic, compared with LRU."""

from dataclasses import dataclass

import numpy as np
import pytest

from lorikeet.simulator.memory import Arena
from lorikeet.simulator.workload_models import GammaArrivals, Zipf, choose_adapters, deal_ranks
from lorikeet_engine.residency.eviction_score import (
    EvictionPolicy,
    LeastRecentlyUsed,
    LeastUsedForItsSize,
)

ADAPTERS, ROOM = 500, 0.1  # GPU memory as a share of all adapters' bytes
SECONDS, WARM_UP_S, RESHUFFLE_S, NOISE_S = 500.0, 120.0, 300.0, 60.0


@dataclass(frozen=True)
class Traffic:
    """Traffic over adapters.

    noisy: in every second minute, a tenth of the adapters gets as many requests as all others.
    """

    exponent: float
    cv: float = 1.0
    noisy: bool = False

    def requests(self) -> list[tuple[float, int]]:
        rng = np.random.default_rng(1)
        arrivals = GammaArrivals(6.0, self.cv)
        times_s = arrivals.times(rng, SECONDS)
        adapters = choose_adapters(
            Zipf(self.exponent), ADAPTERS, times_s, seed=1, reshuffle_s=RESHUFFLE_S
        )
        found = list(zip(times_s.tolist(), adapters.tolist(), strict=True))
        if self.noisy:
            noise_s = [at_s for at_s in arrivals.times(rng, SECONDS) if at_s // NOISE_S % 2 == 0]
            noise = rng.integers(0, ADAPTERS // 10, len(noise_s)).tolist()
            found += zip(noise_s, noise, strict=True)
        return sorted(found)


def misses_and_bytes(traffic: Traffic, policy: EvictionPolicy) -> float:
    """Return misses times loaded bytes, which a policy should keep low."""
    sizes = deal_ranks(ADAPTERS).tolist()
    names = [str(adapter) for adapter in range(ADAPTERS)]
    arena = Arena(int(sum(sizes) * ROOM), sizes, names, policy, lambda adapter: None)
    loaded = []
    for at_s, adapter in traffic.requests():
        if not arena.holds(adapter):
            assert arena.place(adapter, at_s)
            arena.finish_load(adapter)
            loaded += [sizes[adapter]] if at_s >= WARM_UP_S else []
        arena.lease(adapter, at_s)
        arena.release(adapter)
    return len(loaded) * sum(loaded)


@pytest.mark.parametrize(
    ("traffic", "most"),
    [
        (Traffic(0.0), 1.0),
        (Traffic(0.8), 0.85),
        (Traffic(1.0), 0.85),
        (Traffic(1.2), 0.9),
        (Traffic(1.5), 1.05),
        (Traffic(1.0, noisy=True), 0.9),
        (Traffic(1.0, cv=4.0), 0.9),
    ],
    ids=str,
)
def test_the_default_policy_costs_less_than_lru_or_at_most_5_percent_more(traffic, most):
    ours = misses_and_bytes(traffic, LeastUsedForItsSize())
    assert ours < most * misses_and_bytes(traffic, LeastRecentlyUsed())
