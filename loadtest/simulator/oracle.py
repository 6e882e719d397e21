"""Upper bound of any routing: one arena of all replicas' memory that knows future requests."""

import math
from heapq import heappop, heappush

import numpy as np

from loadtest.simulator.outcome import Outcome
from loadtest.simulator.scenario import Scenario
from lorikeet.simulator.traffic import BASE_MODEL
from lorikeet.simulator.workload_models import Ints

ORACLE = "oracle"


def oracle(scenario: Scenario) -> Outcome:
    """Evict by Belady's rule, the adapter with the latest next use, and return the outcome."""
    requests, sizes = scenario.requests(), scenario.sizes.tolist()
    next_use = _next_uses(requests.adapters)
    free = int(scenario.sizes.sum() * scenario.gpu_room) * scenario.replicas
    held: dict[int, float] = {}  # adapter → its next use
    last_first: list[tuple[float, int]] = []
    hits = asked = loads = loaded = 0
    asks = zip(requests.times_s.tolist(), requests.adapters.tolist(), next_use, strict=True)
    for at_s, adapter, following in asks:
        counted = at_s >= scenario.warm_up_s
        asked += counted
        if adapter == BASE_MODEL or adapter in held:
            hits += counted
        else:
            loads += counted
            loaded += sizes[adapter] * counted
            free -= sizes[adapter]
        if adapter != BASE_MODEL:
            held[adapter] = following
            heappush(last_first, (-following, adapter))
        while free < 0:
            use, victim = heappop(last_first)
            if held.get(victim) == -use:
                del held[victim]
                free += sizes[victim]
    return Outcome(ORACLE, asked, hits / max(1, asked), loads, loaded / 1e9)


def _next_uses(adapters: Ints) -> list[float]:
    """Return for each request the index of the next request for its adapter; ∞ if none."""
    following = np.full(len(adapters), math.inf)
    order = np.argsort(adapters, kind="stable")
    same = adapters[order[:-1]] == adapters[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    uses: list[float] = following.tolist()
    return uses
