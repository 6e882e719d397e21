"""Reads an engine's status from its parts while it steps."""

import time
from collections.abc import Iterable

from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import MeasuredCosts, StepCosts, seen_tokens
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.request_queue import RequestQueue
from lorikeet_engine.scheduling.scheduler import Scheduler
from lorikeet_engine.scheduling.sequence import Sequence
from lorikeet_engine.scheduling.step_counters import StepCounters
from lorikeet_engine.telemetry.status import EngineInfo, EngineStatus, LiveStats, TierStatus


def read_status(
    requests: RequestQueue,
    scheduler: Scheduler,
    cache: KVCache,
    tiers: Tiers,
    counters: StepCounters,
    info: EngineInfo,
) -> EngineStatus:
    """Read an engine's status, with `moved` empty; any thread may.

    Takes some 150 µs with a full batch, however many adapters there are.
    """
    tier_status = tiers.status()
    gpu, costs = tier_status[Residency.GPU], info.step_costs
    return EngineStatus(
        live=_live_stats(requests.submitted, scheduler, cache, tiers, gpu, costs),
        tiers=tier_status,
        costs=MeasuredCosts(costs, tiers.load_costs()),
        lookups=counters.lookups.read(),
        loads=tiers.loads(),
        load_failures=tiers.load_failures,
        preemptions=counters.preemptions,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        output_tokens=counters.output_tokens,
        step_s=counters.seconds.read(),
        step_sequences=counters.sequences.read(),
        step_adapters=counters.adapters.read(),
        inter_token_s={tier: gaps.read() for tier, gaps in counters.inter_token_s.items()},
        tensor_parallel=info.tensor_parallel,
    )


def _live_stats(
    submitted: Iterable[Sequence],
    scheduler: Scheduler,
    cache: KVCache,
    tiers: Tiers,
    gpu: TierStatus,
    costs: StepCosts,
) -> LiveStats:
    running, waiting = list(scheduler.running), [*scheduler.waiting, *submitted]
    decoding = [s for s in running if s.decodes and not s.complete]
    prefilling = [s for s in running if not s.decodes]
    pending = waiting + prefilling
    leases = (sequence.lease for sequence in decoding)
    now_s = time.monotonic()
    oldest_s = min((s.timings.arrived_s for s in pending if not s.output_length), default=now_s)
    return LiveStats(
        running=len(running),
        decoding=len(decoding),
        prefilling=len(prefilling),
        waiting=len(waiting),
        pending_tokens=sum(s.remaining for s in pending),
        pending_seen=sum(seen_tokens(s.remaining, s.kv.computed) for s in pending),
        ranks=sum({lease.slot: lease.rank for lease in leases if lease is not None}.values()),
        context=round(sum(costs.decode_sees(s.length) for s in decoding)),
        oldest_wait_s=now_s - oldest_s,
        kv_pages_used=cache.used,
        kv_pages_total=cache.pages,
        loading_bytes=tiers.loading_bytes,
        free_bytes=gpu.capacity_bytes - gpu.used_bytes,
        room_bytes=tiers.available_bytes,
        victim=tiers.victim,
    )
