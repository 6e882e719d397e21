"""Blocks of one arena, allocated and released, in numbers: it knows no memory."""

from bisect import bisect_left


class FreeList:
    """The holes of an arena of `total` elements. Not thread-safe: its owner is."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._holes = [(0, total)] if total else []  # (offset, size), by offset, never touching

    def holes(self) -> list[int]:
        """The holes' sizes, the largest first."""
        return sorted((size for _, size in self._holes), reverse=True)

    def allocate(self, size: int) -> int | None:
        """Allocate from the smallest hole that takes it: the block's offset, or None."""
        fitting = [(hole, at) for at, (_, hole) in enumerate(self._holes) if hole >= size]
        if not fitting:
            return None
        hole, at = min(fitting)
        offset = self._holes[at][0]
        self._holes[at : at + 1] = [(offset + size, hole - size)] if hole > size else []
        self.free -= size
        return offset

    def release(self, offset: int, size: int) -> int:
        """Take a block back and join it with the holes beside it; the size of that hole."""
        self.free += size
        at = bisect_left(self._holes, (offset, 0))
        if at < len(self._holes) and self._holes[at][0] == offset + size:
            size += self._holes.pop(at)[1]
        if at > 0 and sum(self._holes[at - 1]) == offset:
            offset, before = self._holes.pop(at - 1)
            size, at = size + before, at - 1
        self._holes.insert(at, (offset, size))
        return size

    def cheapest_range(self, size: int) -> tuple[int, int]:
        """(begin, end) of a range whose holes add up to `size` or more; size ≤ free.

        Among all such ranges the one whose blocks have the fewest elements; a hole begins and ends
        it.
        """
        assert size <= self.free
        best, first, holes = (self.total + 1, 0, 0), 0, 0
        for offset, hole in self._holes:
            holes += hole
            while holes - self._holes[first][1] >= size:
                holes -= self._holes[first][1]
                first += 1
            if holes >= size:
                begin, end = self._holes[first][0], offset + hole
                best = min(best, (end - begin - holes, begin, end))
        return best[1:]

    def compact(self, begin: int, end: int) -> None:
        """Note that a range's blocks now lie at its front: its holes are one, behind them."""
        first, after = (bisect_left(self._holes, (at, 0)) for at in (begin, end))
        hole = sum(size for _, size in self._holes[first:after])
        self._holes[first:after] = [(end - hole, hole)]
