"""Example of an engine's status."""

from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import StepCosts
from lorikeet_engine.request import DraftCounts, DraftSource
from lorikeet_engine.telemetry.status import (
    BorderUsage,
    Distribution,
    EngineInfo,
    EngineStatus,
    HostPageUsage,
    LiveStats,
    StateUsage,
    TierStatus,
)

INFO = EngineInfo(256, 512, (2,), StepCosts(), "nf4, rounded to fp8", fp8_kv=True)
NOTHING = Distribution((0.1, 1.0), (0, 0, 0), 0.0)
SOME = Distribution((0.1, 1.0), (1, 2, 0), 1.5)


def engine_status(some: Distribution = SOME, nothing: Distribution = NOTHING) -> EngineStatus:
    """Return a status.

    some: distribution of most values.
    nothing: distribution of loads from disk and host, and of token gaps with adapters.
    """
    gpu, host, disk, remote = sorted(Residency, reverse=True)
    return EngineStatus(
        live=LiveStats(running=11, waiting=12, kv_pages_used=13, kv_pages_total=14),
        tiers={
            gpu: TierStatus(3, 300, 1000, 900, 7),
            host: TierStatus(5, 500, 2000, 1900, 8),
            disk: TierStatus(100_000, 9000, 9999, 9999, 9),
        },
        lookups={gpu: 40, host: 30, disk: 20, remote: 10},
        loads={remote: some, disk: nothing, host: nothing},
        load_failures=4,
        preemptions=15,
        tensor_parallel=2,
        states=StateUsage(19, 20, 50, 21, 22, 23, 24),
        border=BorderUsage(41, 42, 43, 44, 45, 46, 47, 48),
        host_pages=HostPageUsage(31, 60, 32, 33, 34, 35, 36, 37, 12, 0, 0, 38, 70, 39, 40),
        prompt_tokens=16,
        cached_tokens=17,
        output_tokens=18,
        drafts=(DraftCounts(DraftSource.LOOKUP, 26, 25), DraftCounts(DraftSource.ANSWERS, 28, 27)),
        step_s=some,
        step_sequences=some,
        step_adapters=some,
        inter_token_s={None: some, gpu: nothing, host: nothing, disk: nothing, remote: nothing},
    )
