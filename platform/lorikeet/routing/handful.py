"""The few replicas that a router looks at: however many there are, a request costs the same."""

from collections.abc import Hashable, Sequence
from random import Random
from typing import TypeVar

from lorikeet.rendezvous import by_preference

R = TypeVar("R", bound=Hashable)

RESIDENTS = 4
NEAR = 2
HOMES = 2
# Adapters whose homes are remembered; finding them takes 1.5 µs a replica.
_REMEMBERED = 100_000


class Homes:
    """Where an adapter comes to that is nowhere, so that all gateways send it to the same replicas.

    For one set of replicas; not thread-safe.
    """

    def __init__(self, replicas: Sequence[str]) -> None:
        self._replicas = tuple(replicas)
        self._known: dict[str, tuple[str, ...]] = {}

    def of(self, digest: str) -> tuple[str, ...]:
        """The first in rendezvous order, HOMES at most."""
        homes = self._known.get(digest)
        if homes is None:
            homes = tuple(by_preference(digest, self._replicas)[:HOMES])
            if len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[digest] = homes
        return homes


def handful(
    residents: Sequence[R], near: Sequence[R], everyone: Sequence[R], rng: Random
) -> list[R]:
    """Some residents, some to which the adapter has not far to go, and strangers, each once.

    residents: with the adapter on the GPU or on its way there. near: with it on the host; where
    there are none, on the disk; its homes where it is nowhere. Two at random: the better of two is
    almost as good as the best of all (Mitzenmacher, "The power of two choices", 2001).
    """
    few = _some(residents, RESIDENTS, rng) + _some(near, NEAR, rng)
    one = int(rng.random() * len(everyone))
    other = (one + 1 + int(rng.random() * (len(everyone) - 1))) % len(everyone)
    return list(dict.fromkeys([*few, everyone[one], everyone[other]]))


def _some(of: Sequence[R], most: int, rng: Random) -> list[R]:
    return list(of) if len(of) <= most else rng.sample(of, most)
