"""Statistics of tiers: loads and their times, failures, evictions, content."""

import pytest

from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import LoadCosts
from lorikeet_engine.residency.stats import Hop, LoadTimes
from tests.engine.residency.tiers_driver import SIZE, make

IMAGE = 4 * SIZE  # bytes
DISK, HOST, GPU = Residency.DISK, Residency.HOST, Residency.GPU


def loads(bench):
    return {str(tier): sum(found.counts) for tier, found in bench.tiers.loads().items()}


def test_a_cold_adapter_makes_three_loads_and_one_from_the_host_makes_one(bench, shelf):
    here = bench(gpu=1, host=4)
    a, b = make(shelf, "ab")
    here.load(a)
    assert loads(here) == {"remote": 1, "disk": 1, "host": 1}
    here.load(b)
    here.load(a)
    assert loads(here) == {"remote": 2, "disk": 2, "host": 3}
    assert all(seconds.total > 0 for seconds in here.tiers.loads().values())


def test_a_pin_to_disk_counts_only_a_load_from_remote(bench, shelf):
    here = bench()
    (a,) = make(shelf, "a")
    here.tiers.pin(a, DISK)
    here.until(lambda: loads(here)["remote"] == 1)
    assert loads(here) == {"remote": 1, "disk": 0, "host": 0}


def test_a_failed_load_counts_only_as_a_failure(bench, shelf):
    here = bench()
    a, b = make(shelf, "ab")
    shelf.errors["a"] = OSError("the connection was reset")
    here.failure(a)
    here.load(b)
    assert here.tiers.load_failures == 1
    assert loads(here) == {"remote": 1, "disk": 1, "host": 1}


def test_each_tier_reports_content_capacity_and_evictions(bench, shelf):
    here = bench(gpu=2, host=3)
    refs = make(shelf, "abcd")
    for ref in refs:
        here.load(ref)
    counts = here.tiers.status()
    gpu, host = counts[GPU], counts[HOST]
    assert (gpu.adapters, gpu.used_bytes, gpu.capacity_bytes) == (2, 2 * IMAGE, 2 * IMAGE)
    assert (host.adapters, host.used_bytes, host.capacity_bytes) == (3, 3 * IMAGE, 3 * IMAGE)
    assert (gpu.evictions, host.evictions) == (2, 1)


def test_the_disk_counts_adapters_once_and_every_files_bytes(bench, shelf):
    here = bench()
    refs = make(shelf, "abc")
    for ref in refs:
        here.load(ref)
        here.image(ref)
    for name in ("notes.txt", f"{'e' * 64}.part"):
        (here.folder / name).write_text("neither")
    (here.folder / f"{'f' * 64}.{'0' * 16}").write_text("of another shape")
    here.tiers._disk.changed()
    files = [path for path in here.folder.iterdir() if path.name[:3] not in ("not", "eee")]
    disk = here.tiers.status()[DISK]
    assert disk.adapters == 3
    assert disk.used_bytes == sum(path.stat().st_size for path in files)
    (here.folder / refs[0].digest).unlink()
    (here.folder / here.tiers._disk.image_name(refs[0].digest)).unlink()
    here.tiers._disk._index._listed_ns = (
        None  # perhaps so soon after that the folder's time is the same
    )
    here.tiers._disk.changed()
    assert here.tiers.status()[DISK].adapters == 2


def test_an_adapter_leaves_the_disk_with_its_last_file(bench, shelf):
    refs = make(shelf, "abcd")
    blob = shelf.blob("a").stat().st_size
    here = bench(disk_bytes=int(2.5 * blob))
    for ref in refs:
        here.load(ref, to=DISK)
        here.load(ref)
        here.image(ref)
    gone = sum(not here.tiers._disk.holds(ref.digest) for ref in refs)
    assert gone
    assert here.tiers.status()[DISK].evictions == gone


def test_unmeasured_costs_are_the_defaults():
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


def test_the_mean_follows_recent_loads():
    hop = Hop()
    for _ in range(3):
        hop.add(1.0, 1000)
    for _ in range(50):
        hop.add(3.0, 4000)
    assert hop.seconds == pytest.approx(3.0, rel=0.01)
    assert hop.size_bytes == pytest.approx(4000, rel=0.01)


def test_every_hop_of_a_load_is_measured(shelf, bench):
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
