"""What an engine does at one moment, read while it goes on."""

import time
from collections.abc import Iterable

from lorikeet_engine.kv_cache import KVCache
from lorikeet_engine.memory_map import MemoryMap
from lorikeet_engine.news import EngineLoad
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.scheduler import Scheduler
from lorikeet_engine.sequence import Sequence


def engine_load(
    submitted: Iterable[Sequence], scheduler: Scheduler, cache: KVCache, tiers: Tiers
) -> EngineLoad:
    """On any thread: some 100 µs with a full batch, however many adapters there are.

    submitted: not taken in yet. A sequence that was preempted waits like one that has no token.
    """
    sequences = list(scheduler.running)
    decoding = [s for s in sequences if s.remaining == 1 and not s.complete]
    waiting = [*scheduler.waiting, *(s for s in sequences if s.remaining > 1), *submitted]
    arena = tiers.load()
    return EngineLoad(
        running=len(decoding),
        ranks=_ranks(decoding),
        waiting=len(waiting),
        waiting_tokens=sum(s.remaining for s in waiting),
        oldest_wait_s=_oldest_wait_s(waiting),
        loading_bytes=arena.loading_bytes,
        free_bytes=arena.free_bytes,
        room_bytes=arena.room_bytes,
        victim_bytes=arena.victim_bytes,
        victim_uses=round(arena.victim_uses, 1),  # it fades all the time: not news each time
        kv_used=cache.used / cache.pages,
    )


def memory_map(
    submitted: Iterable[Sequence], scheduler: Scheduler, cache: KVCache, tiers: Tiers
) -> MemoryMap:
    """On any thread: some 2 ms with 2,000 adapters on the GPU, in which steps go on.

    submitted: not taken in yet.
    """
    waiting = [*scheduler.waiting, *submitted]
    return MemoryMap(
        running=len(scheduler.running),
        waiting=len(waiting),
        oldest_wait_s=_oldest_wait_s(waiting),
        kv_pages_used=cache.used,
        kv_pages_total=cache.pages,
        tiers=tiers.counts(),
        rows=tiers.blocks(),
    )


def _ranks(sequences: Iterable[Sequence]) -> int:
    leases = [sequence.lease for sequence in sequences]
    return sum({lease.slot: lease.rank for lease in leases if lease is not None}.values())


def _oldest_wait_s(sequences: Iterable[Sequence]) -> float:
    now_s = time.monotonic()
    return now_s - min((s.progress.arrived_s for s in sequences if not s.made), default=now_s)
