"""Replicas whose memory is as a test wants it."""

import hashlib
from collections.abc import Sequence

from lorikeet.placement.report import ReplicaMap
from lorikeet_engine.adapter import Residency
from lorikeet_engine.counts import TierCounts
from lorikeet_engine.memory_map import Block, MemoryMap

MIB = 2**20
ARENA = 1024 * MIB


def block(
    name: str,
    *pieces: tuple[int, int],
    tenant: str = "acme",
    rank: int = 8,
    leases: int = 0,
    pinned: bool = False,
) -> Block:
    """Pieces: where they lie and how large they are, MiB."""
    places = tuple((offset * MIB, size * MIB) for offset, size in pieces)
    digest = hashlib.sha256(name.encode()).hexdigest()
    return Block(tenant, name, 1, digest, rank, leases, pinned, False, places)


def replica(name: str, blocks: Sequence[Block], base_model: str = "tiny") -> ReplicaMap:
    used = sum(size for each in blocks for _, size in each.pieces)
    tiers = {
        Residency.GPU: TierCounts(len(blocks), used, ARENA, 0),
        Residency.HOST: TierCounts(5, ARENA, 4 * ARENA, 0),
        Residency.DISK: TierCounts(7, 2 * ARENA, 8 * ARENA, 0),
    }
    rows = tuple(map(tuple, blocks))
    return ReplicaMap(name, base_model, MemoryMap(3, 1, 0.5, 20, 100, tiers, rows))
