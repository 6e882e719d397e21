"""Reservation of a tier's memory for pinned adapters. Room for one unpinned adapter is always
left.
"""


class MemoryReservations:
    """Memory reserved for pinned adapters in an arena of `capacity` elements. Not thread-safe.

    Memory for the largest adapter that requests have asked for is never reserved. So a pin may have
    to wait for memory, but never makes a request wait.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._granted: dict[str, int] = {}  # digest → elements, oldest first
        self._largest = 0

    @property
    def capacity(self) -> int:
        """Number of elements that can be reserved in total: the arena's less the largest requested
        adapter's.
        """
        return max(0, self._capacity - self._largest)

    @property
    def granted(self) -> int:
        """Number of elements that are reserved now."""
        return sum(self._granted.values())

    def __contains__(self, digest: str) -> bool:
        return digest in self._granted

    def __len__(self) -> int:
        return len(self._granted)

    def can_grant(self, elements: int) -> bool:
        """Whether this many more elements can be reserved, leaving enough for an unpinned
        adapter.
        """
        return self.granted + elements <= self.capacity

    def grant(self, digest: str, elements: int) -> bool:
        """Reserve memory for a pinned adapter; return False if too little would be left."""
        if digest not in self._granted:
            if not self.can_grant(elements):
                return False
            self._granted[digest] = elements
        return True

    def revoke_for(self, elements: int) -> None:
        """Revoke reservations, the latest first, until a requested adapter of this size fits."""
        self._largest = max(self._largest, elements)
        while self._granted and self.granted + elements > self._capacity:
            self._granted.popitem()

    def revoke(self, digest: str) -> None:
        """Revoke the reservation for an adapter; do nothing if it has none."""
        self._granted.pop(digest, None)

    def revoke_newest(self) -> bool:
        """Revoke the latest reservation; return False if there is none."""
        return bool(self._granted and self._granted.popitem())
