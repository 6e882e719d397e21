"""Status update of a replica for gateways: the engine's status as far as routing uses it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import MeasuredCosts
from lorikeet_engine.telemetry.status import LiveStats


class PrefixRoom(NamedTuple):
    """Room of a replica for cached prefixes.

    gpu_tokens: number of tokens whose KV pages the GPUs have room for.
    host_tokens: number of tokens whose pages the host has room for; 0: no host memory for pages.
    host_token_bytes: bytes of a token's pages on one GPU, which a fetch from the host copies.
    """

    gpu_tokens: int
    host_tokens: int
    host_token_bytes: int


@dataclass(frozen=True)
class StatusUpdate:
    """Status of a replica, one item of the stream of updates that it sends to a gateway.

    An update has the replica's live stats. It also lists the adapters that have moved to another
    tier (Residency: remote store, disk, host memory or GPU) since the stream's previous update.

    seq: number that grows with each update of a replica to any gateway, so that late updates are
        recognised.
    live: current live stats.
    moved: the new tier of each moved adapter, by digest.
    begins_snapshot, ends_snapshot: whether this is the first or the last update of a snapshot. The
        updates of a snapshot together name each adapter on disk, in host memory or on the GPU at
        least once.
    costs: measured costs of the engine's steps and adapter loads; None if not sent with this
        update.
    max_context: maximum number of tokens of prompt plus output; None if not sent with this update.
    prefix_room: room for cached prefixes; None if unknown or not sent with this update.
    """

    seq: int
    live: LiveStats
    moved: Mapping[str, Residency] = field(default_factory=dict)
    begins_snapshot: bool = False
    ends_snapshot: bool = False
    costs: MeasuredCosts | None = None
    max_context: int | None = None
    prefix_room: PrefixRoom | None = None


_UPDATE = TypeAdapter(StatusUpdate)


def to_stats(update: StatusUpdate) -> dict[str, Any]:
    """Return the update in plain types: Serve's own processes lack our classes."""
    return {"status": _UPDATE.dump_json(update)}


def from_stats(stats: Mapping[str, Any]) -> StatusUpdate | None:
    """Return the update that `to_stats` put into `stats`; None if there is none yet."""
    return _UPDATE.validate_json(stats["status"]) if "status" in stats else None
