"""The routers to compare: the product's and the baselines."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import cycle
from random import Random

from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet.simulator.replica import SimulatedReplica
from lorikeet.simulator.router import LeastCostRouter

BOUND = 1.25
"""How many requests bounded hashing lets a replica have, in multiples of the mean."""


class PowerOfTwo:
    """The less busy of two at random: Ray Serve's default."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def route(self, fleet: SimulatedFleet, request: int, now_s: float) -> SimulatedReplica:  # noqa: ARG002
        """Choose the replica of a request."""
        return self.among(fleet.replicas)

    def among(self, replicas: list[SimulatedReplica]) -> SimulatedReplica:
        """The less busy of two of these."""
        if len(replicas) == 1:
            return replicas[0]
        one, other = self._rng.sample(replicas, 2)
        return one if one.outstanding <= other.outstanding else other


class Multiplexing:
    """Ray Serve's model multiplexing: to a replica that has the adapter, unless all are full.

    most: a replica's max_ongoing_requests.
    """

    def __init__(self, seed: int, most: int = 256) -> None:
        self._pick, self._most = PowerOfTwo(seed), most

    def route(self, fleet: SimulatedFleet, request: int, now_s: float) -> SimulatedReplica:  # noqa: ARG002
        """Choose the replica of a request."""
        adapter = fleet.adapter_of[request]
        holders = fleet.on_gpu[adapter] if adapter is not None else []
        free = [replica for replica in holders if replica.outstanding < self._most]
        if not free:
            # Serve asks first those that have the fewest models; once they are full, any.
            full = round(0.9 * fleet.setup.gpu_bytes / fleet.setup.sizes.mean())
            models = [min(full, len(one.arena.residents)) for one in fleet.replicas]
            fewest = min(models)
            pairs = zip(fleet.replicas, models, strict=True)
            free = [one for one, held in pairs if held == fewest]
        return self._pick.among(free)


class HashRing:
    """Each name at a hundred points around a ring."""

    def __init__(self, names: Iterable[str]) -> None:
        self._points = sorted((_point(f"{name} {p}"), name) for name in names for p in range(100))

    def names_from(self, key: str) -> Iterator[str]:
        """The names from the key's own point on, for ever."""
        at = bisect_right(self._points, (_point(key), ""))
        return (name for _, name in cycle(self._points[at:] + self._points[:at]))


class BoundedHashing:
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).

    Around a ring from the adapter's point on, to the first replica with fewer requests than BOUND
    times the mean.
    """

    def __init__(self, seed: int) -> None:
        self._pick = PowerOfTwo(seed)
        self._replicas: dict[str, SimulatedReplica] = {}
        self._ring = HashRing(())

    def route(self, fleet: SimulatedFleet, request: int, now_s: float) -> SimulatedReplica:  # noqa: ARG002
        """Choose the replica of a request."""
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


def _point(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")
