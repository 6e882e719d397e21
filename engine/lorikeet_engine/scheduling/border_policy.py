"""Policy of the border between adapters and KV pages: the side that loses more time gets memory.

Each side remembers what it evicted last, as much as all the memory that moves would still hold
(ghost lists, as in ARC, Megiddo and Modha 2003). What is wanted again from there costs time that
more memory would have saved: the load of an adapter, or the computation of a prefix. So does the
time in which requests wait for memory of that side alone. The rate of these seconds is a side's
demand (FastLibra, arXiv 2505.03756, compares the two sides by time to first token, too).

The border moves towards the side whose demand is higher than _TIMES the other's. It begins with one
unit and goes twice as far with each decision, so a short burst moves little, and a swing of the
traffic much.

The constants were chosen in a simulation (tests/engine/scheduling/test_border_policy.py): two
caches of entries of one size, used in turn, whose demands swing every minute. With these values the
border arrives within 15 s of a swing, and rests while both sides lose alike. No GPU has measured
them.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable

EVERY_S = 0.25
"""Seconds between two decisions."""
_HALF_LIFE_S = 2.0
_TIMES = 2.0
_LEAST = 0.002  # seconds lost per second below which nothing moves
_LARGEST_PART = 64  # a decision moves at most a 64th of the memory


class Evicted:
    """Latest evictions of a cache: those that it would still hold with `reach` more memory.

    reach: size of the memory, in the unit of all sizes.
    """

    def __init__(self, reach: int) -> None:
        self._reach, self._total = reach, 0
        self._sizes: OrderedDict[bytes | str, int] = OrderedDict()

    def add(self, key: bytes | str, size: int) -> None:
        """Record an eviction; forget the oldest ones beyond `reach`."""
        self.remove(key)
        self._sizes[key] = size
        self._total += size
        while self._total > self._reach:
            self._total -= self._sizes.popitem(last=False)[1]

    def remove(self, key: bytes | str) -> int:
        """Forget an eviction; return its size, or 0 if it is not remembered."""
        size = self._sizes.pop(key, 0)
        self._total -= size
        return size

    def run(self, keys: Iterable[bytes]) -> int:
        """Return the number of keys up to the first one that is not remembered."""
        count = 0
        for key in keys:
            if key not in self._sizes:
                break
            count += 1
        return count


class BorderPolicy:
    """Decides how far the border moves, from the seconds that each side loses.

    adapters, pages: demand of each side: seconds lost per second, recent time counting most.
    """

    def __init__(self, units: int) -> None:
        """Start without demand.

        units: number of units of memory that both sides have together.
        """
        self.adapters = self.pages = 0.0
        self._most = max(1, units // _LARGEST_PART)
        self._step = 0  # of the last decision, negative towards the KV pages

    def decide(self, adapters_s: float, pages_s: float, elapsed_s: float) -> int:
        """Return the number of units to move: to the adapters, or if negative to the KV pages.

        adapters_s, pages_s: seconds that each side has lost since the last call.
        elapsed_s: seconds since the last call.
        """
        kept = math.exp2(-elapsed_s / _HALF_LIFE_S)
        rate = math.log(2) / _HALF_LIFE_S
        self.adapters = self.adapters * kept + adapters_s * rate
        self.pages = self.pages * kept + pages_s * rate
        direction = 0
        if self.adapters > max(_LEAST, _TIMES * self.pages):
            direction = 1
        elif self.pages > max(_LEAST, _TIMES * self.adapters):
            direction = -1
        if direction > 0:  # half of what was lost, as the side now has more
            self.adapters /= 2
        elif direction < 0:
            self.pages /= 2
        further = self._step * direction > 0
        self._step = direction * min(self._most, 2 * abs(self._step) if further else 1)
        return self._step
