"""Demand for adapters: decayed counts of the uses that all replicas of a base model report."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import AdapterRef

HALF_LIFE_S = 45.0
"""Seconds in which a counted use of an adapter decays to half, as in the engines."""
_MOST_ADAPTERS = 32_768
_FORGOTTEN = 0.01  # uses below which an adapter is dropped: one use five minutes ago


@dataclass(slots=True)
class AdapterDemand:
    """Demand for one adapter.

    uses: recent requests on all replicas: a count that halves every HALF_LIFE_S seconds.
    image_bytes: bytes of the adapter on each GPU; None while no replica reports them.
    """

    ref: AdapterRef
    uses: float
    image_bytes: int | None


class Demand:
    """Exponentially decayed count of uses by adapter, of the 32,768 most used adapters.

    Replicas count the uses. Counts of a replica that has gone keep decaying, so that its adapters
    are not forgotten at once.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterDemand] = {}
        self._observed_s = -math.inf

    def observe(self, reports: Iterable[ReplicaReport], now_s: float) -> None:
        """Update the counts from the reports of every replica.

        now_s: seconds of the caller's clock.
        """
        kept = math.exp2((self._observed_s - now_s) / HALF_LIFE_S)
        self._observed_s = now_s
        for each in self.adapters.values():
            each.uses *= kept
        counted: dict[str, float] = defaultdict(float)
        for report in reports:
            for adapter in report.adapters:
                digest = adapter.digest
                if digest not in self.adapters:
                    self.adapters[digest] = AdapterDemand(adapter.ref, 0.0, None)
                demand = self.adapters[digest]
                demand.image_bytes = adapter.image_bytes or demand.image_bytes
                counted[digest] += adapter.uses
        for digest, uses in counted.items():
            demand = self.adapters[digest]
            demand.uses = max(demand.uses, uses)
        self._forget()

    def _forget(self) -> None:
        known = [(digest, w) for digest, w in self.adapters.items() if w.uses >= _FORGOTTEN]
        if len(known) > _MOST_ADAPTERS:
            known.sort(key=lambda each: -each[1].uses)
        self.adapters = dict(known[:_MOST_ADAPTERS])
