"""What a replica says of itself, in numbers."""

from lorikeet.placement.signals import Signals, from_stats, measure, to_stats
from lorikeet_engine.adapter import Residency
from lorikeet_engine.news import EngineLoad
from lorikeet_engine.request import AdapterReport, EngineReport
from tests.placement.given import ref


def test_what_is_used_more_than_once_or_pinned_is_the_working_set():
    adapters = (
        AdapterReport(ref("used"), Residency.DISK, 0, 0, False, 30, 1.5),
        AdapterReport(ref("once"), Residency.GPU, 20, 0, False, 20, 0.9),
        AdapterReport(ref("pinned"), Residency.GPU, 10, 0, True, 10, 0.0),
        AdapterReport(ref("pinned-elsewhere"), Residency.HOST, 0, 0, True, 10, 0.0),
    )
    report = EngineReport(3, 5, 10, 40, 60, 100, adapters)
    load = EngineLoad(running=3, waiting=5, oldest_wait_s=0.5, kv_used=0.25)
    assert measure(report, load, 16, alone=0.4) == Signals(40, 100, 0.5, 0.5, 0.25, 0.4)


def test_numbers_carry_all_that_is_known():
    for alone in (None, 0.0, 0.4):
        signals = Signals(40, 100, 0.5, 0.5, 0.25, alone)
        assert from_stats(to_stats(signals) | {"running_requests": 3}) == signals
        assert from_stats({"arena_bytes": 100}) is None
        assert all(isinstance(value, int | float) for value in to_stats(signals).values())
