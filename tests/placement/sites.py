"""A made-up fleet that carries orders out, as short as a test can say it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lorikeet.placement.popular import Prefetch, ReplicaView, prefetch_popular
from lorikeet_engine.adapter import Residency

GPU, HOST, DISK = Residency.GPU, Residency.HOST, Residency.DISK


def site(
    room: int, *on_gpu: str, host: int = 0, on_host: tuple[str, ...] = (), **more
) -> ReplicaView:
    """What is held there, each used once."""
    held = dict.fromkeys(on_host, HOST) | dict.fromkeys(on_gpu, GPU)
    return ReplicaView(room, host, held, dict.fromkeys(held, 1.0), **more)


def evictable(site: ReplicaView, tier: Residency, sizes: Mapping[str, int]) -> list[str]:
    """What an engine would evict from a tier, in its order."""
    there = [d for d, t in site.held.items() if t is tier and site.kept.get(d, DISK) < tier]
    return sorted(there, key=lambda d: (site.uses.get(d, 0.0) / math.sqrt(sizes[d]), d))


def free_bytes(site: ReplicaView, tier: Residency, sizes: Mapping[str, int]) -> int:
    """What of the room beside the pins nobody uses."""
    room = site.gpu_bytes if tier is GPU else site.host_bytes
    return room - sum(sizes[d] for d in evictable(site, tier, sizes))


def carry_out(
    site: ReplicaView, orders: Sequence[Prefetch], sizes: Mapping[str, int]
) -> ReplicaView:
    """The same replica afterwards. What has no room although all else is evicted is a bug."""
    new: set[str] = set()
    for digest, tier, uses in orders:
        while free_bytes(site, tier, sizes) < sizes[digest]:
            victim = next(d for d in evictable(site, tier, sizes) if d not in new)
            left = site.kept.get(victim, DISK)
            site = replace(site, held={**site.held, victim: left})
        new.add(digest)
        held, used = {**site.held, digest: tier}, {**site.uses, digest: uses}
        site = replace(site, held=held, uses=used)
    return site


def settle(
    demand: Mapping[str, float], sizes: Mapping[str, int], sites: Mapping[str, ReplicaView], **more
) -> tuple[dict[str, ReplicaView], list[Prefetch]]:
    """The fleet once no more is ordered, and the orders that it took."""
    sites, given = dict(sites), []
    for _ in range(1000):
        orders = prefetch_popular(demand, sizes, sites, **more)
        if not orders:
            return sites, given
        for name, some in orders.items():
            sites[name] = carry_out(sites[name], some, sizes)
            given += some
    raise AssertionError("orders never end")
