"""Reports of replicas with given adapters in memory."""

import hashlib
from collections.abc import Sequence

from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.status import AdapterStatus, EngineStatus, LiveStats, TierStatus

MIB = 2**20
ARENA = 1024 * MIB


def block(
    name: str,
    *pieces: tuple[int, int],
    tenant: str = "acme",
    rank: int = 8,
    leases: int = 0,
    pinned: bool = False,
) -> AdapterStatus:
    """Make an adapter's status. pieces: offset and size of each piece, MiB."""
    places = tuple((offset * MIB, size * MIB) for offset, size in pieces)
    digest = hashlib.sha256(name.encode()).hexdigest()
    return AdapterStatus(
        *(tenant, name, 1, digest),
        Residency.GPU,
        image_bytes=sum(size for _, size in places),
        uses=1.0,
        pinned=pinned,
        rank=rank,
        leases=leases,
        kept=pinned,
        pieces=places,
    )


def replica(name: str, blocks: Sequence[AdapterStatus], base_model: str = "tiny") -> ReplicaReport:
    used = sum(size for each in blocks for _, size in each.pieces)
    tiers = {
        Residency.GPU: TierStatus(len(blocks), used, ARENA, 0, 0),
        Residency.HOST: TierStatus(5, ARENA, 4 * ARENA, 0, 0),
        Residency.DISK: TierStatus(7, 2 * ARENA, 8 * ARENA, 0, 0),
    }
    live = LiveStats(running=3, waiting=1, oldest_wait_s=0.5, kv_pages_used=20, kv_pages_total=100)
    return ReplicaReport(name, base_model, EngineStatus(live, tiers), tuple(blocks))
