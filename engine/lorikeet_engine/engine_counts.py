"""What an engine has counted and holds, read while it goes on."""

from collections.abc import Sized

from lorikeet_engine.counts import EngineCounts
from lorikeet_engine.kv_cache import KVCache
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.scheduler import Scheduler
from lorikeet_engine.step_counts import StepCounts


def engine_counts(
    submitted: Sized, scheduler: Scheduler, cache: KVCache, tiers: Tiers, steps: StepCounts
) -> EngineCounts:
    """On any thread: some 50 µs, however many adapters there are.

    submitted: choices that were not taken in yet.
    """
    return EngineCounts(
        tiers=tiers.counts(),
        lookups=steps.lookups.read(),
        loads=tiers.loads(),
        load_failures=tiers.load_failures,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting) + len(submitted),
        kv_pages_used=cache.used,
        kv_pages_total=cache.pages,
        preemptions=steps.preemptions,
        prompt_tokens=steps.prompt_tokens,
        cached_tokens=steps.cached_tokens,
        output_tokens=steps.output_tokens,
        step_s=steps.seconds.read(),
        step_sequences=steps.sequences.read(),
        step_adapters=steps.adapters.read(),
        inter_token_s={found: gaps.read() for found, gaps in steps.gaps.items()},
    )
