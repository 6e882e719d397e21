"""Reads an engine's status while it goes on."""

import time
from collections.abc import Iterable

from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import MeasuredCosts, StepCosts
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.scheduler import Scheduler
from lorikeet_engine.scheduling.sequence import Sequence
from lorikeet_engine.scheduling.step_counters import StepCounters
from lorikeet_engine.telemetry.status import EngineStatus, LiveStats, TierStatus


def read_status(
    submitted: Iterable[Sequence],
    scheduler: Scheduler,
    cache: KVCache,
    tiers: Tiers,
    steps: StepCounters,
    step_costs: StepCosts,
) -> EngineStatus:
    """On any thread: some 150 µs with a full batch, however many adapters there are.

    submitted: not taken in yet. Nothing is said to have moved.
    """
    held = tiers.status()
    return EngineStatus(
        live=_live_stats(submitted, scheduler, cache, tiers, held[Residency.GPU]),
        tiers=held,
        costs=MeasuredCosts(step_costs, tiers.load_costs()),
        lookups=steps.lookups.read(),
        loads=tiers.loads(),
        load_failures=tiers.load_failures,
        preemptions=steps.preemptions,
        prompt_tokens=steps.prompt_tokens,
        cached_tokens=steps.cached_tokens,
        output_tokens=steps.output_tokens,
        step_s=steps.seconds.read(),
        step_sequences=steps.sequences.read(),
        step_adapters=steps.adapters.read(),
        inter_token_s={found: gaps.read() for found, gaps in steps.gaps.items()},
    )


def _live_stats(
    submitted: Iterable[Sequence],
    scheduler: Scheduler,
    cache: KVCache,
    tiers: Tiers,
    gpu: TierStatus,
) -> LiveStats:
    running, waiting = list(scheduler.running), [*scheduler.waiting, *submitted]
    decoding = [s for s in running if s.remaining == 1 and not s.complete]
    prefilling = [s for s in running if s.remaining > 1]
    pending = waiting + prefilling
    leases = (sequence.lease for sequence in decoding)
    now_s = time.monotonic()
    oldest_s = min((s.progress.arrived_s for s in pending if not s.made), default=now_s)
    return LiveStats(
        running=len(running),
        decoding=len(decoding),
        prefilling=len(prefilling),
        waiting=len(waiting),
        pending_tokens=sum(s.remaining for s in pending),
        ranks=sum({lease.slot: lease.rank for lease in leases if lease is not None}.values()),
        oldest_wait_s=now_s - oldest_s,
        kv_pages_used=cache.used,
        kv_pages_total=cache.pages,
        loading_bytes=tiers.loading_bytes,
        free_bytes=gpu.capacity_bytes - gpu.used_bytes,
        room_bytes=tiers.room_bytes,
        victim=tiers.victim,
    )
