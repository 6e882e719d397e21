"""What an engine counts while it works, and the message that tells it: plain, picklable.

Counters grow for as long as the engine lives. One thread counts; others may read while it does, and
then miss at most what it is about to count.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lorikeet_engine.adapter import Residency

STEP_S = (1e-3, 2.5e-3, 5e-3, 7.5e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Bounds for what a step takes, and for the time between two tokens."""
LOAD_S = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bounds for what loads take, from a copy over PCIe to a download that crawls."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Bounds for how many of something a step has."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values by bucket: counts[i] of them are above bounds[i − 1] and at most bounds[i].

    counts has one more entry than bounds, for what is above all of them. total: their sum.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts values in fixed buckets; a quarter of a microsecond each."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """bounds: ascending."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Distribution:
        """What was counted so far."""
        return Distribution(self._bounds, tuple(self._counts), self._total)


class Tally:
    """Counts by tier. Thread-safe."""

    def __init__(self, tiers: Iterable[Residency]) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(tiers, 0)

    def add(self, tier: Residency) -> None:
        """Count one."""
        with self._lock:
            self._counts[tier] += 1

    def read(self) -> dict[Residency, int]:
        """What was counted so far."""
        return dict(self._counts)


@dataclass(frozen=True, slots=True)
class TierCounts:
    """What one tier holds now, what it has room for, and how many adapters it has evicted so far.

    An adapter counts in every tier that holds it. The disk's are those of all processes that share
    the folder; its evictions are this process's.
    """

    adapters: int
    used_bytes: int
    capacity_bytes: int
    evictions: int


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What an engine has counted since it was started, and what it holds and does now.

    lookups: requests that were taken, by where their adapter was. loads: seconds by where an
    adapter was brought from: from remote to the disk, from the disk to the host, from the host to
    the GPU, so that one that was remote makes all three. load_failures: of any kind.
    prompt_tokens: of the choices that have begun, and of these cached_tokens were found computed.
    step_s: from a step's launch, or from when the one before it was read, until it was read.
    step_sequences, step_adapters: how many, distinct ones, a step had. inter_token_s: between two
    tokens of a choice, by where its adapter was when the request came; None without one.
    """

    tiers: Mapping[Residency, TierCounts]
    lookups: Mapping[Residency, int]
    loads: Mapping[Residency, Distribution]
    load_failures: int
    running: int
    waiting: int
    kv_pages_used: int
    kv_pages_total: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    step_s: Distribution
    step_sequences: Distribution
    step_adapters: Distribution
    inter_token_s: Mapping[Residency | None, Distribution]
