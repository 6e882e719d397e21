"""Histograms and counters that grow for as long as the engine lives.

One thread counts; others may read while it does, and then miss at most what it is about to count.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable

from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.status import Distribution

STEP_S = (1e-3, 2.5e-3, 5e-3, 7.5e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Bucket bounds for the time of a step, and for the time between two tokens."""
LOAD_S = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bucket bounds for the time of a load, from a copy over PCIe to a slow download."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Bucket bounds for how many sequences or adapters a step has."""


class Histogram:
    """Counts values in fixed buckets; a quarter of a microsecond each."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Start empty. bounds: of the buckets, ascending."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Distribution:
        """The values counted so far."""
        return Distribution(self._bounds, tuple(self._counts), self._total)


class TierCounter:
    """Counts by tier. Thread-safe."""

    def __init__(self, tiers: Iterable[Residency]) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(tiers, 0)

    def add(self, tier: Residency) -> None:
        """Count one."""
        with self._lock:
            self._counts[tier] += 1

    def read(self) -> dict[Residency, int]:
        """The counts so far."""
        return dict(self._counts)
