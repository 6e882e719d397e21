"""Made-up fleet that carries out its prefetches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lorikeet.placement.prefetch_plan import Prefetch, ReplicaView, plan_prefetches
from lorikeet_engine.adapter import Residency

GPU, HOST, DISK = Residency.GPU, Residency.HOST, Residency.DISK


def replica(
    room: int, *on_gpu: str, host: int = 0, on_host: tuple[str, ...] = (), **more
) -> ReplicaView:
    """Build a replica that holds these adapters, each used once.

    room: bytes for adapters on the GPU.
    host: bytes for adapters on the host.
    """
    held = dict.fromkeys(on_host, HOST) | dict.fromkeys(on_gpu, GPU)
    return ReplicaView(room, host, held, dict.fromkeys(held, 1.0), **more)


def evictable(replica: ReplicaView, tier: Residency, sizes: Mapping[str, int]) -> list[str]:
    """List the adapters that an engine would evict from a tier, in its order."""
    there = [d for d, t in replica.held.items() if t is tier and replica.pinned.get(d, DISK) < tier]
    return sorted(there, key=lambda d: (replica.uses.get(d, 0.0) / math.sqrt(sizes[d]), d))


def free_bytes(replica: ReplicaView, tier: Residency, sizes: Mapping[str, int]) -> int:
    """Return the free bytes of a tier, without those of pins."""
    room = replica.gpu_bytes if tier is GPU else replica.host_bytes
    return room - sum(sizes[d] for d in evictable(replica, tier, sizes))


def perform(
    replica: ReplicaView, prefetches: Sequence[Prefetch], sizes: Mapping[str, int]
) -> ReplicaView:
    """Return the replica after its prefetches; each must fit once all others are evicted."""
    new: set[str] = set()
    for digest, tier, uses in prefetches:
        while free_bytes(replica, tier, sizes) < sizes[digest]:
            victim = next(d for d in evictable(replica, tier, sizes) if d not in new)
            left = replica.pinned.get(victim, DISK)
            replica = replace(replica, held={**replica.held, victim: left})
        new.add(digest)
        held, used = {**replica.held, digest: tier}, {**replica.uses, digest: uses}
        replica = replace(replica, held=held, uses=used)
    return replica


def settle(
    demand: Mapping[str, float],
    sizes: Mapping[str, int],
    replicas: Mapping[str, ReplicaView],
    **more,
) -> tuple[dict[str, ReplicaView], list[Prefetch]]:
    """Return the fleet once no more prefetches are planned, and the prefetches until then."""
    replicas, given = dict(replicas), []
    for _ in range(1000):
        prefetches = plan_prefetches(demand, sizes, replicas, **more)
        if not prefetches:
            return replicas, given
        for name, some in prefetches.items():
            replicas[name] = perform(replicas[name], some, sizes)
            given += some
    raise AssertionError("prefetches never end")
