"""Which adapter to give up first. Plain numbers: a simulator can run these by the million."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

HALF_LIFE_S = 45.0
# Adapters whose uses are remembered, on the GPU or not: the last ones used.
_REMEMBERED = 16_384


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """An adapter at the moment of a use: its size, how often it was used, when that is.

    uses: this one and those before, each halved every HALF_LIFE_S.
    """

    elements: int
    uses: float
    at_s: float


class EvictionPolicy(Protocol):
    """Says what an adapter is worth after a use. The one that is worth least is evicted first.

    Until its next use the number stays: what ages must rise with the time of use instead.
    """

    def worth(self, use: UsageRecord) -> float:
        """What it is worth to keep the adapter, from this use on."""


class LeastRecentlyUsed:
    """The one that was used longest ago goes first."""

    def worth(self, use: UsageRecord) -> float:
        """The time of its last use."""
        return use.at_s


class LeastUsedForItsSize:
    """Lowest uses / √elements first, where uses are halved every HALF_LIFE_S.

    Least uses / elements first would miss most rarely, least uses first would load the fewest
    bytes; this is halfway. The uses are those of LRFU (Lee et al., 2001). docs/eviction.md has the
    numbers.
    """

    def worth(self, use: UsageRecord) -> float:
        """The logarithm of that, where age is a later use's advantage instead of a loss."""
        return math.log2(use.uses) - 0.5 * math.log2(use.elements) + use.at_s / HALF_LIFE_S


class Uses:
    """How often each adapter was used lately, also while it was elsewhere.

    `add` belongs to one thread, `at` may be called from any.
    """

    def __init__(self) -> None:
        # By digest, the last used last: its uses and the last one's time.
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def at(self, digest: str, now_s: float) -> float:
        """Its uses so far, each halved every HALF_LIFE_S."""
        uses, last_s = self._counts.get(digest, (0.0, now_s))
        return uses * math.exp2((last_s - now_s) / HALF_LIFE_S)

    def add(self, digest: str, now_s: float) -> None:
        """It is used now."""
        uses = self.at(digest, now_s) + 1.0
        self._counts[digest] = uses, now_s
        self._counts.move_to_end(digest)
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)
