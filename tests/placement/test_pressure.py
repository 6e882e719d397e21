"""Pressure on a replica as numbers."""

from lorikeet.placement.pressure import ReplicaPressure, from_stats, measure_pressure, to_stats
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.status import EngineStatus, LiveStats, TierStatus
from tests.placement.builders import held, ref


def test_adapters_used_more_than_once_or_pinned_are_the_working_set():
    adapters = (
        held(ref("used"), Residency.DISK, 30, 1.5),
        held(ref("once"), Residency.GPU, 20, 0.9),
        held(ref("pinned"), Residency.GPU, 10, pinned=True),
        held(ref("pinned-elsewhere"), Residency.HOST, 10, pinned=True),
    )
    live = LiveStats(
        running=4, decoding=3, prefilling=1, waiting=4, oldest_wait_s=0.5, kv_pages_used=10,
        kv_pages_total=40,
    )  # fmt: skip
    status = EngineStatus(live, {Residency.GPU: TierStatus(2, 60, 100, 90, 0)})
    report = ReplicaReport("r0", "tiny", status, adapters)
    assert measure_pressure(report, 16, sole_copies=0.4) == ReplicaPressure(
        40, 100, 0.5, 0.5, 0.25, 0.4
    )


def test_sequences_in_the_background_are_no_pressure():
    live = LiveStats(
        running=16, decoding=16, waiting=90, background=103, background_pages=31, kv_pages_used=39,
        kv_pages_total=40,
    )  # fmt: skip
    status = EngineStatus(live, {Residency.GPU: TierStatus(2, 60, 100, 90, 0)})
    pressure = measure_pressure(ReplicaReport("r0", "tiny", status, ()), 16, sole_copies=0.0)
    assert (pressure.running_share, pressure.kv_share) == (3 / 16, 0.2)


def test_statistics_keep_every_known_value():
    for sole_copies in (None, 0.0, 0.4):
        signals = ReplicaPressure(40, 100, 0.5, 0.5, 0.25, sole_copies)
        assert from_stats(to_stats(signals) | {"running_requests": 3}) == signals
        assert from_stats({"arena_bytes": 100}) is None
        assert all(isinstance(value, int | float) for value in to_stats(signals).values())
