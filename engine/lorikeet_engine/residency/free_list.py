"""Free list of an arena: sizes and offsets of its free and used blocks, without any memory."""

from bisect import bisect_left


class FreeList:
    """Free blocks ("holes") and used blocks of an arena. Not thread-safe.

    total: size of the arena in elements, the unit of all sizes and offsets.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._holes = [(0, total)] if total else []  # (offset, size), by offset, never adjacent

    def holes(self) -> list[int]:
        """Return the sizes of all free blocks, largest first."""
        return sorted((size for _, size in self._holes), reverse=True)

    def allocate(self, size: int) -> int | None:
        """Allocate a block from the smallest hole that fits.

        Returns the block's offset; None if no hole is large enough.
        """
        fitting = [(hole, at) for at, (_, hole) in enumerate(self._holes) if hole >= size]
        if not fitting:
            return None
        hole, at = min(fitting)
        offset = self._holes[at][0]
        self._holes[at : at + 1] = [(offset + size, hole - size)] if hole > size else []
        self.free -= size
        return offset

    def release(self, offset: int, size: int) -> int:
        """Free a block and merge it with adjacent holes; return the size of the merged hole."""
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
        """Return (begin, end) of the range that is cheapest to compact into one hole of this size.

        The range begins and ends with a hole, its holes add up to `size` or more, and its used
        blocks have the fewest elements of all such ranges. `size` must not exceed the free
        elements.
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

    def extend(self, size: int) -> None:
        """Add this many free elements to the arena's end."""
        self.total += size
        self.release(self.total - size, size)

    def cut(self, size: int) -> None:
        """Take this many elements from the arena's end, used ones included.

        The caller no longer releases the elements after the new end.
        """
        self.total -= size
        kept = [(offset, min(hole, self.total - offset)) for offset, hole in self._holes]
        self._holes = [(offset, hole) for offset, hole in kept if hole > 0]
        self.free = sum(hole for _, hole in self._holes)

    def copy(self) -> "FreeList":
        """Return a free list with the same blocks."""
        copied = FreeList(self.total)
        copied.free, copied._holes = self.free, self._holes.copy()
        return copied

    def compact(self, begin: int, end: int) -> None:
        """Record that a range's used blocks were moved to its front, leaving one hole after them.

        begin, end: the range, as `cheapest_range` returned it.
        """
        first, after = (bisect_left(self._holes, (at, 0)) for at in (begin, end))
        hole = sum(size for _, size in self._holes[first:after])
        self._holes[first:after] = [(end - hole, hole)]
