"""Which adapter to give up first. Plain numbers: a simulator can run these by the million."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

HALF_LIFE_S = 600.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """An adapter that may be evicted. uses: leases so far, each halved every HALF_LIFE_S."""

    digest: str
    elements: int
    uses: float
    last_used_s: float


class EvictionPolicy(Protocol):
    """Orders candidates."""

    def order(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        """All of them, the first to evict first."""


class LeastRecentlyUsed:
    """The one that was used longest ago goes first."""

    def order(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:  # noqa: ARG002
        """All of them, the first to evict first."""
        return sorted(candidates, key=lambda candidate: candidate.last_used_s)


class CostAware:
    """Lowest 0.45 frequency + 0.10 recency + 0.45 size first, each against the largest.

    Large adapters stay longer because they take longer to bring back. (Chameleon, MICRO 2025)
    """

    def order(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        """All of them, the first to evict first."""
        if not candidates:
            return []
        uses = {c.digest: decayed(c.uses, now_s - c.last_used_s) for c in candidates}
        most_uses = max(uses.values()) or 1.0
        longest_idle = max(now_s - c.last_used_s for c in candidates) or 1.0
        largest = max(c.elements for c in candidates) or 1

        def score(c: Candidate) -> float:
            recency = 1.0 - (now_s - c.last_used_s) / longest_idle
            return 0.45 * uses[c.digest] / most_uses + 0.10 * recency + 0.45 * c.elements / largest

        return sorted(candidates, key=score)


def decayed(uses: float, idle_s: float) -> float:
    """What is left of a count of uses after some time without any."""
    return uses * math.exp2(-max(idle_s, 0.0) / HALF_LIFE_S)
