"""Routers to compare: the product's, baselines and an upper bound."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import cycle
from random import Random

import numpy as np

from loadtest.simulator.outcome import Outcome
from loadtest.simulator.scenario import Scenario
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet.simulator.replica import SimulatedReplica
from lorikeet.simulator.router import LeastCostRouter
from lorikeet.simulator.traffic import BASE_MODEL
from lorikeet.simulator.workload_models import Ints

ORACLE = "oracle"
BOUND = 1.25
"""Maximum number of requests of a replica in bounded hashing, as a multiple of the mean."""


class PowerOfTwo:
    """Router to the less busy of two random replicas: Ray Serve's default."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def route(self, fleet: SimulatedFleet, request: int, now_s: float) -> SimulatedReplica:  # noqa: ARG002
        """Choose the replica for a request.

        request: index of the request.
        """
        return self.among(fleet.replicas)

    def among(self, replicas: list[SimulatedReplica]) -> SimulatedReplica:
        """Return the less busy of two random replicas of a list."""
        if len(replicas) == 1:
            return replicas[0]
        one, other = self._rng.sample(replicas, 2)
        return one if one.outstanding <= other.outstanding else other


class Multiplexing:
    """Ray Serve's model multiplexing: chooses a replica that has the adapter, unless all these
    replicas are full.

    most: max_ongoing_requests of a replica.
    """

    def __init__(self, seed: int, most: int = 256) -> None:
        self._pick, self._most = PowerOfTwo(seed), most

    def route(self, fleet: SimulatedFleet, request: int, now_s: float) -> SimulatedReplica:  # noqa: ARG002
        """Choose the replica for a request.

        request: index of the request.
        """
        adapter = fleet.adapter_of[request]
        holders = fleet.on_gpu[adapter] if adapter is not None else []
        free = [replica for replica in holders if replica.outstanding < self._most]
        if not free:
            # Serve first tries the replicas with the fewest models; once those are full, any.
            full = round(0.9 * fleet.setup.gpu_bytes / fleet.setup.sizes.mean())
            models = [min(full, len(one.arena.residents)) for one in fleet.replicas]
            fewest = min(models)
            pairs = zip(fleet.replicas, models, strict=True)
            free = [one for one, held in pairs if held == fewest]
        return self._pick.among(free)


class HashRing:
    """Hash ring with a hundred points for each name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._points = sorted((_point(f"{name} {p}"), name) for name in names for p in range(100))

    def names_from(self, key: str) -> Iterator[str]:
        """Yield the names around the ring from the key's point, without end."""
        at = bisect_right(self._points, (_point(key), ""))
        return (name for _, name in cycle(self._points[at:] + self._points[:at]))


class BoundedHashing:
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).

    A request goes to the first replica with fewer requests than BOUND times the mean, around the
    hash ring from the adapter's point.
    """

    def __init__(self, seed: int) -> None:
        self._pick = PowerOfTwo(seed)
        self._replicas: dict[str, SimulatedReplica] = {}
        self._ring = HashRing(())

    def route(self, fleet: SimulatedFleet, request: int, now_s: float) -> SimulatedReplica:  # noqa: ARG002
        """Choose the replica for a request.

        request: index of the request.
        """
        adapter = fleet.adapter_of[request]
        if adapter is None:
            return self._pick.among(fleet.replicas)
        if not self._replicas:
            self._replicas = {f"replica {one.name}": one for one in fleet.replicas}
            self._ring = HashRing(self._replicas)
        bound = math.ceil(BOUND * (fleet.in_flight + 1) / len(fleet.replicas))
        names = self._ring.names_from(f"adapter {adapter}")
        return next(one for name in names if (one := self._replicas[name]).outstanding < bound)


ROUTERS = {
    "power of two": PowerOfTwo,
    "multiplexing": Multiplexing,
    "bounded hashing": BoundedHashing,
    "lorikeet": LeastCostRouter,
}


def oracle(scenario: Scenario) -> Outcome:
    """Return the outcome of an upper bound of any routing.

    One arena has all replicas' memory and knows future requests: it evicts by Belady's rule, the
    adapter with the latest next use.
    """
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


def _point(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")


def _next_uses(adapters: Ints) -> list[float]:
    """Return for each request the index of the next request for its adapter; ∞ if none."""
    following = np.full(len(adapters), math.inf)
    order = np.argsort(adapters, kind="stable")
    same = adapters[order[:-1]] == adapters[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    uses: list[float] = following.tolist()
    return uses
