"""Histograms and counters that grow for as long as the engine lives.

Unless a class says otherwise, only one thread may count. Any thread may read at any time, and may
then miss the value that is just being counted.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable

from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.status import Distribution

STEP_S = (1e-3, 2.5e-3, 5e-3, 7.5e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Upper bounds of histogram buckets, in seconds: time of a step, and time between two tokens."""
LOAD_S = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of histogram buckets, in seconds: time to load an adapter.

They range from a copy over PCIe to a slow download.
"""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Upper bounds of histogram buckets: number of sequences in a step, and number of adapters."""


class Histogram:
    """Histogram with fixed buckets; counting a value takes a quarter of a microsecond."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Start with no values counted.

        bounds: upper bounds of the buckets, ascending; one more bucket counts values above all of
            them.
        """
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Distribution:
        """Return the distribution of the values counted so far."""
        return Distribution(self._bounds, tuple(self._counts), self._total)


class TierCounter:
    """Counters of events, one for each tier of adapter memory. Thread-safe."""

    def __init__(self, tiers: Iterable[Residency]) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(tiers, 0)

    def add(self, tier: Residency) -> None:
        """Count one event of a tier."""
        with self._lock:
            self._counts[tier] += 1

    def read(self) -> dict[Residency, int]:
        """Return the number of events of each tier so far."""
        return dict(self._counts)
