"""Contiguous blocks of one arena, handed out and taken back. Knows numbers, no memory."""

from bisect import bisect_left


class FreeList:
    """The holes of an arena of `total` elements. Not thread-safe: its owner is."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._holes = [(0, total)] if total else []  # (offset, size), by offset, never touching

    def allocate(self, size: int) -> int | None:
        """The offset of a block from the smallest hole that takes it, or None."""
        fitting = [(hole, at) for at, (_, hole) in enumerate(self._holes) if hole >= size]
        if not fitting:
            return None
        hole, at = min(fitting)
        offset = self._holes[at][0]
        self._holes[at : at + 1] = [(offset + size, hole - size)] if hole > size else []
        self.free -= size
        return offset

    def release(self, offset: int, size: int) -> None:
        """Take a block back and join it with the holes beside it."""
        self.free += size
        at = bisect_left(self._holes, (offset, 0))
        if at < len(self._holes) and self._holes[at][0] == offset + size:
            size += self._holes.pop(at)[1]
        if at > 0 and sum(self._holes[at - 1]) == offset:
            offset, before = self._holes.pop(at - 1)
            size, at = size + before, at - 1
        self._holes.insert(at, (offset, size))

    def close_holes(self) -> None:
        """All blocks now lie at the front, in whatever order: one hole is left behind them."""
        self._holes = [(self.total - self.free, self.free)] if self.free else []
