"""Eviction policies in plain numbers, so that a simulator can run them by the million."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

HALF_LIFE_S = 45.0
# Adapters whose uses are remembered, on the GPU or not; the least recently used is forgotten.
_MAX_REMEMBERED = 16_384


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """An adapter's size, and its uses at the time of one use.

    uses: this use and earlier ones, each halved every HALF_LIFE_S.
    """

    elements: int
    uses: float
    at_s: float


class EvictionPolicy(Protocol):
    """Score of an adapter at a use. The lowest score is evicted first.

    A score stays constant until the next use: instead of falling with age, it rises with the time
    of use.
    """

    def score(self, use: UsageRecord) -> float:
        """Return the adapter's score from this use on."""


class LeastRecentlyUsed:
    """Policy that evicts the adapter whose last use is oldest."""

    def score(self, use: UsageRecord) -> float:
        """Return the time of the last use."""
        return use.at_s


class LeastUsedForItsSize:
    """Policy that evicts the lowest uses / √elements, with uses halved every HALF_LIFE_S.

    Lowest uses / elements first would give the fewest misses, lowest uses first the fewest loaded
    bytes; the root is halfway. The uses are those of LRFU (Lee et al., 2001). docs/eviction.md has
    the numbers.
    """

    def score(self, use: UsageRecord) -> float:
        """Return log2(uses / √elements) plus the use's time in half-lives."""
        return math.log2(use.uses) - 0.5 * math.log2(use.elements) + use.at_s / HALF_LIFE_S


class RecentUses:
    """Recent uses of each adapter, remembered after it left the GPU.

    `add` belongs to one thread; `count` may be called from any.
    """

    def __init__(self) -> None:
        # digest → (uses, time of the last one), least recently used first
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def count(self, digest: str, now_s: float) -> float:
        """Return an adapter's uses so far, each halved every HALF_LIFE_S."""
        uses, last_s = self._counts.get(digest, (0.0, now_s))
        return uses * math.exp2((last_s - now_s) / HALF_LIFE_S)

    def add(self, digest: str, now_s: float) -> None:
        """Count a use of an adapter now."""
        uses = self.count(digest, now_s) + 1.0
        self._counts[digest] = uses, now_s
        self._counts.move_to_end(digest)
        if len(self._counts) > _MAX_REMEMBERED:
            self._counts.popitem(last=False)
