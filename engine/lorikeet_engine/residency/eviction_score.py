"""Eviction policies. They need only numbers, so that a simulator can run them a million times."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

HALF_LIFE_S = 45.0
# Adapters whose uses are remembered, on the GPU or not; the least recently used is forgotten.
_MAX_REMEMBERED = 16_384


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """Size and use count of an adapter at one of its uses, from which the eviction score is
    computed.

    elements: size of the adapter, packed for the GPU, in elements.
    uses: number of uses up to and including this one; a use's weight halves every HALF_LIFE_S
        seconds.
    at_s: time of this use.
    """

    elements: int
    uses: float
    at_s: float


class EvictionPolicy(Protocol):
    """Policy that scores adapters. The adapter with the lowest score is evicted first.

    An adapter is scored at each use, and keeps the score until its next use. Scores of idle
    adapters do not fall; instead, later uses get higher scores.
    """

    def score(self, use: UsageRecord) -> float:
        """Return the score that an adapter keeps from this use to the next."""


class LeastRecentlyUsed:
    """Policy that evicts the adapter whose last use is oldest."""

    def score(self, use: UsageRecord) -> float:
        """Return the time of an adapter's last use, as its score."""
        return use.at_s


class LeastUsedForItsSize:
    """Policy that evicts the adapter with the lowest uses / √elements.

    A use's weight halves every HALF_LIFE_S seconds, as in LRFU (Lee et al., 2001). Ordering by uses
    / elements would give the fewest misses, by uses alone the fewest loaded bytes
    (docs/eviction.md).
    """

    def score(self, use: UsageRecord) -> float:
        """Return log2(uses / √elements), plus the time of the use in half-lives, as the score."""
        return math.log2(use.uses) - 0.5 * math.log2(use.elements) + use.at_s / HALF_LIFE_S


class RecentUses:
    """Counts of each adapter's uses, in which the weight of a use halves every HALF_LIFE_S seconds.

    Kept for the _MAX_REMEMBERED adapters used last, even those that have left the GPU.

    Only one thread may call `add`; any thread may call `count`.
    """

    def __init__(self) -> None:
        # digest → (uses, time of the last one), least recently used first
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def count(self, digest: str, now_s: float) -> float:
        """Return an adapter's number of uses; the weight of a use halves every HALF_LIFE_S seconds.

        now_s: current time.
        """
        uses, last_s = self._counts.get(digest, (0.0, now_s))
        return uses * math.exp2((last_s - now_s) / HALF_LIFE_S)

    def add(self, digest: str, now_s: float) -> None:
        """Record that an adapter is used at `now_s`."""
        uses = self.count(digest, now_s) + 1.0
        self._counts[digest] = uses, now_s
        self._counts.move_to_end(digest)
        if len(self._counts) > _MAX_REMEMBERED:
            self._counts.popitem(last=False)
