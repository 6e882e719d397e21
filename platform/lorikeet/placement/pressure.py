"""Pressure on one replica, as an object and as the statistics for Serve's autoscaler."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import Residency

_IN_USE = 1.0  # decayed uses from which an adapter belongs to the working set


@dataclass(frozen=True, slots=True)
class ReplicaPressure:
    """Pressure on one replica at one moment.

    Sequences in the background (lines of batches, tier flex) count in none but working_bytes: they
    take what is idle, and need no replica of their own.

    working_bytes: bytes on the GPU that the adapters in use on the replica, at any tier, would
        take together, with the pinned adapters on its GPU.
    arena_bytes: capacity of the GPU's memory for adapters.
    oldest_wait_s: longest time that a request without an output token has waited, in seconds.
    running_share: number of running and waiting sequences, as a fraction of the number that the
        replica may run at once; may exceed 1.
    kv_share: fraction of KV pages in use.
    sole_copies: fraction of the adapters in use that no other replica has on GPU or host; None
        while unknown.
    """

    working_bytes: float
    arena_bytes: float
    oldest_wait_s: float
    running_share: float
    kv_share: float
    sole_copies: float | None = None


_NAMES = {each.name for each in fields(ReplicaPressure)}


def measure_pressure(
    report: ReplicaReport, max_running: int, sole_copies: float | None
) -> ReplicaPressure:
    """Compute a replica's pressure from its report.

    max_running: sequences that the replica may run at once.
    sole_copies: fraction of the adapters in use that no other replica has on GPU or host; None
        while unknown.
    """
    live = report.status.live
    sequences = max(0, live.decoding + live.pending - live.background)
    pages = max(0, live.kv_pages_used - live.background_pages)
    working = (
        adapter.image_bytes or 0
        for adapter in report.adapters
        if adapter.uses >= _IN_USE or (adapter.pinned and adapter.pieces)
    )
    return ReplicaPressure(
        working_bytes=sum(working),
        arena_bytes=report.status.tiers[Residency.GPU].capacity_bytes,
        oldest_wait_s=live.oldest_wait_s,
        running_share=sequences / max_running,
        kv_share=pages / live.kv_pages_total,
        sole_copies=sole_copies,
    )


def to_stats(pressure: ReplicaPressure) -> dict[str, float]:
    """Return the pressure as numbers by name, without unknown values."""
    return {name: value for name, value in asdict(pressure).items() if value is not None}


def from_stats(stats: Mapping[str, float]) -> ReplicaPressure | None:
    """Parse numbers from to_stats; None if some are missing, as from another release."""
    known = {name: stats[name] for name in _NAMES if name in stats}
    return ReplicaPressure(**known) if known.keys() | {"sole_copies"} == _NAMES else None
