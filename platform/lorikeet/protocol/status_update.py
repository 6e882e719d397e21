"""A replica's status update for gateways: the part of its engine's status that routing weighs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import MeasuredCosts
from lorikeet_engine.telemetry.status import LiveStats


@dataclass(frozen=True)
class StatusUpdate:
    """A replica's live stats, and what has moved since its update before on the same feed.

    seq: grows with every update of a replica to any gateway, so that a late one is known to be
    old. moved: where adapters are now, by digest. From an update that begins a snapshot to one that
    ends it, each adapter nearer than remote is named at least once. costs: None if not sent again.
    """

    seq: int
    live: LiveStats
    moved: Mapping[str, Residency] = field(default_factory=dict)
    begins_snapshot: bool = False
    ends_snapshot: bool = False
    costs: MeasuredCosts | None = None


_UPDATE = TypeAdapter(StatusUpdate)


def to_stats(update: StatusUpdate) -> dict[str, Any]:
    """The update as Serve's own processes can carry it, which know no classes of ours."""
    return {"status": _UPDATE.dump_json(update)}


def from_stats(stats: Mapping[str, Any]) -> StatusUpdate | None:
    """The update that to_stats was given; None for a replica without one yet."""
    return _UPDATE.validate_json(stats["status"]) if "status" in stats else None
