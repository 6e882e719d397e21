"""What one replica says of the pressure on it, as an object and as the numbers that Serve takes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from lorikeet_engine.news import EngineLoad
from lorikeet_engine.request import EngineReport

# Uses from which an adapter belongs to the working set: more than one of late.
_IN_USE = 1.0


@dataclass(frozen=True, slots=True)
class Signals:
    """One replica at one moment.

    working_bytes: adapters in use there, wherever they are, and pinned ones. oldest_wait_s: of the
    requests without a token. seats, kv: share of the sequences of one step that run or wait, and of
    the KV pages in use. alone: share of the adapters in use that no other replica has on GPU or
    host; None while it does not know.
    """

    working_bytes: float
    arena_bytes: float
    oldest_wait_s: float
    seats: float
    kv: float
    alone: float | None = None


_NAMES = {each.name for each in fields(Signals)}


def measure(
    report: EngineReport, load: EngineLoad, max_running: int, alone: float | None
) -> Signals:
    """A replica's signals, from what its engine says."""
    working = (
        adapter.image_bytes
        for adapter in report.adapters
        if adapter.uses >= _IN_USE or (adapter.pinned and adapter.gpu_bytes)
    )
    return Signals(
        working_bytes=sum(working),
        arena_bytes=report.arena_bytes_total,
        oldest_wait_s=load.oldest_wait_s,
        seats=(load.running + load.waiting) / max_running,
        kv=load.kv_used,
        alone=alone,
    )


def to_stats(signals: Signals) -> dict[str, float]:
    """As numbers; what is not known is left out."""
    return {name: value for name, value in asdict(signals).items() if value is not None}


def from_stats(stats: Mapping[str, float]) -> Signals | None:
    """The same from those numbers; None if some are missing, as when another version sent them."""
    known = {name: stats[name] for name in _NAMES if name in stats}
    return Signals(**known) if known.keys() | {"alone"} == _NAMES else None
