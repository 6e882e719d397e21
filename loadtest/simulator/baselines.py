"""Who gets a request: the product's router, and what others do."""

import math
from bisect import bisect_right
from hashlib import blake2b
from random import Random

from lorikeet.simulator.fleet import Fleet
from lorikeet.simulator.replica import Replica
from lorikeet.simulator.router import LeastCost


class PowerOfTwo:
    """The less busy of two at random: Ray Serve's default."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def route(self, fleet: Fleet, request: int, now_s: float) -> Replica:  # noqa: ARG002
        """See Router."""
        return self.among(fleet.replicas)

    def among(self, replicas: list[Replica]) -> Replica:
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

    def route(self, fleet: Fleet, request: int, now_s: float) -> Replica:  # noqa: ARG002
        """See Router."""
        adapter = fleet.adapter_of[request]
        holders = fleet.on_gpu[adapter] if adapter >= 0 else []
        free = [replica for replica in holders if replica.outstanding < self._most]
        if not free:
            # Serve asks first those that have the fewest models; once they are full, any.
            full = round(0.9 * fleet.setup.gpu_bytes / fleet.setup.sizes.mean())
            models = [min(full, len(one.arena.residents)) for one in fleet.replicas]
            fewest = min(models)
            pairs = zip(fleet.replicas, models, strict=True)
            free = [one for one, held in pairs if held == fewest]
        return self._pick.among(free)


class BoundedHashing:
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).

    Around a ring from the adapter's point on, to the first replica with fewer requests than 1.25
    times the mean.
    """

    _POINTS = 100

    def __init__(self, seed: int, factor: float = 1.25) -> None:
        self._pick, self._factor = PowerOfTwo(seed), factor
        self._ring: list[tuple[int, int]] = []
        self._starts: dict[int, int] = {}

    def route(self, fleet: Fleet, request: int, now_s: float) -> Replica:  # noqa: ARG002
        """See Router."""
        adapter = fleet.adapter_of[request]
        if adapter < 0:
            return self._pick.among(fleet.replicas)
        if not self._ring:
            pairs = ((r, p) for r in range(len(fleet.replicas)) for p in range(self._POINTS))
            self._ring = sorted((_point(f"replica {r} {p}"), r) for r, p in pairs)
        if adapter not in self._starts:
            place = _point(f"adapter {adapter}")
            self._starts[adapter] = bisect_right(self._ring, (place, -1))
        at = self._starts[adapter]
        bound = math.ceil(self._factor * (fleet.in_flight + 1) / len(fleet.replicas))
        while True:
            replica = fleet.replicas[self._ring[at % len(self._ring)][1]]
            if replica.outstanding < bound:
                return replica
            at += 1


ROUTERS = {
    "power of two": PowerOfTwo,
    "multiplexing": Multiplexing,
    "bounded hashing": BoundedHashing,
    "lorikeet": LeastCost,
}


def _point(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")
