"""The room of one tier of one replica while a prefetch plan is made."""

import math
from collections.abc import Callable


class TierBudget:
    """The free bytes of a tier, and which adapters are evicted for more.

    They go in the engines' own order: the least used for its size first.
    """

    def __init__(self, room_bytes: int) -> None:
        self.free_bytes = self._room_bytes = room_bytes
        self._sizes: dict[str, int] = {}
        self._scores: dict[str, float] = {}
        self._order: list[str] | None = None  # the first to be evicted is last

    @property
    def free_share(self) -> float:
        """The share of the tier's room that is free."""
        return self.free_bytes / max(1, self._room_bytes)

    def hold(self, digest: str, size: int, uses: float) -> None:
        """Count an adapter that is there and may be evicted."""
        self.free_bytes -= size
        self._sizes[digest] = size
        self._scores[digest] = uses / math.sqrt(max(1, size))

    def victims(self, size: int, uses: float, loss: Callable[[str], float]) -> list[str] | None:
        """The adapters to evict for `size` bytes; None where that would lose more than `uses`."""
        if self._order is None:
            self._order = sorted(self._sizes, key=lambda d: (self._scores[d], d), reverse=True)
        victims: list[str] = []
        free = max(0, self.free_bytes)  # copies of what is on the GPU may take more than there is
        for digest in reversed(self._order):
            if free >= size:
                break
            uses -= loss(digest)
            if uses < 0:
                return None
            victims.append(digest)
            free += self._sizes[digest]
        return victims if free >= size else None

    def put(self, size: int, victims: list[str]) -> None:
        """Evict victims, the first to go, and take in what this plan never evicts."""
        for digest in victims:
            self.free_bytes += self._sizes.pop(digest)
        if victims and self._order is not None:
            del self._order[-len(victims) :]
        self.free_bytes -= size
