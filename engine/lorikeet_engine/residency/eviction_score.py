"""Which adapter to evict first. Plain numbers: a simulator can run these by the million."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

HALF_LIFE_S = 45.0
# Adapters whose uses are remembered, on the GPU or not: the last ones used.
_MAX_REMEMBERED = 16_384


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """An adapter's size, and its uses at the moment of one.

    uses: this one and those before, each halved every HALF_LIFE_S.
    """

    elements: int
    uses: float
    at_s: float


class EvictionPolicy(Protocol):
    """Scores an adapter at a use. The lowest score is evicted first.

    Until the next use the score stays: instead of falling with age it rises with the time of use.
    """

    def score(self, use: UsageRecord) -> float:
        """The adapter's score from this use on."""


class LeastRecentlyUsed:
    """Evicts what was used longest ago."""

    def score(self, use: UsageRecord) -> float:
        """The time of the last use."""
        return use.at_s


class LeastUsedForItsSize:
    """Evicts the lowest uses / √elements, where uses are halved every HALF_LIFE_S.

    Least uses / elements first would miss most rarely, least uses first would load the fewest
    bytes; this is halfway. The uses are those of LRFU (Lee et al., 2001). docs/eviction.md has the
    numbers.
    """

    def score(self, use: UsageRecord) -> float:
        """The logarithm of uses / √elements, plus the use's time in half-lives."""
        return math.log2(use.uses) - 0.5 * math.log2(use.elements) + use.at_s / HALF_LIFE_S


class RecentUses:
    """How often each adapter was used recently, also while it was elsewhere.

    `add` belongs to one thread, `count` may be called from any.
    """

    def __init__(self) -> None:
        # By digest, the last used last: its uses and the last one's time.
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def count(self, digest: str, now_s: float) -> float:
        """An adapter's uses so far, each halved every HALF_LIFE_S."""
        uses, last_s = self._counts.get(digest, (0.0, now_s))
        return uses * math.exp2((last_s - now_s) / HALF_LIFE_S)

    def add(self, digest: str, now_s: float) -> None:
        """Count a use of an adapter now."""
        uses = self.count(digest, now_s) + 1.0
        self._counts[digest] = uses, now_s
        self._counts.move_to_end(digest)
        if len(self._counts) > _MAX_REMEMBERED:
            self._counts.popitem(last=False)
