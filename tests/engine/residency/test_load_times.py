"""What loads cost, as measured."""

import pytest

from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import LoadCosts
from lorikeet_engine.residency.load_times import Hop, LoadTimes
from tests.engine.residency.tiers_driver import SIZE, make


def test_costs_are_those_given_until_something_is_measured():
    assert LoadTimes().costs() == LoadCosts()


def test_a_load_of_the_mean_size_takes_the_mean_time():
    times = LoadTimes()
    for _ in range(5):
        times.copies.add(0.010, 50_000_000)
        times.reads.add(0.100, 50_000_000)
        times.downloads.add(0.500, 50_000_000)
    costs = times.costs()
    sums = {Residency.HOST: 0.010, Residency.DISK: 0.110, Residency.REMOTE: 0.610}
    for tier, seconds in sums.items():
        assert costs.load_s(tier, 50_000_000) == pytest.approx(seconds)
    own = LoadCosts()
    assert costs.disk_latency_s * costs.disk_bytes_per_s == pytest.approx(
        own.disk_latency_s * own.disk_bytes_per_s
    )


def test_the_mean_follows_what_loads_take_now():
    hop = Hop()
    for _ in range(3):
        hop.add(1.0, 1000)
    for _ in range(50):
        hop.add(3.0, 4000)
    assert hop.seconds == pytest.approx(3.0, rel=0.01)
    assert hop.size_bytes == pytest.approx(4000, rel=0.01)


def test_every_hop_that_an_adapter_takes_is_measured(shelf, bench):
    a, b_ = make(shelf, "ab")
    b, times = bench(), {}
    b.lease(a).release()
    for name in ("downloads", "reads", "copies"):
        times[name] = getattr(b.tiers._stats._times, name)
        assert times[name].size_bytes == SIZE * 4
        assert 0 < times[name].seconds < 1
    assert b.tiers.load_costs().remote_latency_s != LoadCosts().remote_latency_s
    downloaded_s = times["downloads"].seconds
    b.tiers.pin(b_, Residency.DISK)
    b.until(lambda: b.tiers.residency(b_) is Residency.DISK)
    b.lease(b_).release()
    assert times["downloads"].seconds == downloaded_s  # it came from the disk this time
