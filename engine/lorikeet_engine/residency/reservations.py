"""Memory that a tier reserves for pins, always leaving enough for one other adapter."""


class MemoryReservations:
    """Memory reserved for pinned adapters in an arena of `capacity` elements. Not thread-safe.

    Memory for the largest adapter that requests have asked for is never reserved: a pin may have to
    wait, but never keeps a request waiting.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._granted: dict[str, int] = {}  # digest → elements, oldest first
        self._largest = 0

    @property
    def capacity(self) -> int:
        """Elements that can be reserved in all."""
        return max(0, self._capacity - self._largest)

    @property
    def granted(self) -> int:
        """Elements that are reserved."""
        return sum(self._granted.values())

    def __contains__(self, digest: str) -> bool:
        return digest in self._granted

    def __len__(self) -> int:
        return len(self._granted)

    def can_grant(self, elements: int) -> bool:
        """Whether one more reservation of this size leaves enough for others."""
        return self.granted + elements <= self.capacity

    def grant(self, digest: str, elements: int) -> bool:
        """Reserve memory for an adapter; return False if too little would remain."""
        if digest not in self._granted:
            if not self.can_grant(elements):
                return False
            self._granted[digest] = elements
        return True

    def revoke_for(self, elements: int) -> None:
        """Revoke reservations, newest first, for an adapter that a request needs."""
        self._largest = max(self._largest, elements)
        while self._granted and self.granted + elements > self._capacity:
            self._granted.popitem()

    def revoke(self, digest: str) -> None:
        """End a reservation; do nothing without one."""
        self._granted.pop(digest, None)

    def revoke_newest(self) -> bool:
        """End the newest reservation; return False when there is none."""
        return bool(self._granted and self._granted.popitem())
