"""Loads: remote → disk → host → GPU, with sources that hang or fail."""

import errno
import os
import threading
import time
from dataclasses import replace

import pytest

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import AdapterLoadFailed, AdapterTooLarge, LoadFault
from lorikeet_engine.residency import loader
from lorikeet_engine.residency.disk.cache import DiskCache
from tests.engine.blobs import SHAPE, everywhere, until
from tests.engine.residency.tiers_driver import ONE, SIZE, make

# Loads to the GPU.


def test_an_adapter_moves_up_tier_by_tier_and_arrives_whole(shelf, bench, tmp_path):
    (a,) = make(shelf, "a")
    b = bench()
    assert b.tiers.residency(a) is Residency.REMOTE
    assert b.tiers.lease(a) is None
    b.tiers.request(a)
    until(lambda: b.tiers.residency(a) is Residency.HOST, b.woken)
    assert b.tiers.lease(a) is None
    assert (tmp_path / "cache" / a.digest).read_bytes() == shelf.blob("a").read_bytes()
    b.tiers.advance()
    assert b.tiers.residency(a) is Residency.GPU
    with b.lease(a) as lease:
        assert lease.rank == 4
        assert b.report() == {"a": (Residency.GPU, 1, False)}
        assert b.tiers.adapters()[0].gpu_bytes == b.gpu.used_bytes == SIZE * 4
    assert b.report() == {"a": (Residency.GPU, 0, False)}
    assert b.gpu.capacity_bytes == 4 * SIZE * 4


def test_the_weights_are_the_same_tensors_for_life(shelf, bench):
    b = bench(gpu=2)
    arena, table = b.tiers.weights.arena, b.tiers.weights.table
    for ref in make(shelf, "abcdef"):
        b.lease(ref).release()
    assert b.tiers.weights.arena is arena
    assert b.tiers.weights.table is table


def test_a_second_engine_finds_the_blob_on_disk(shelf, bench):
    (a,) = make(shelf, "a")
    bench().load(a)
    other = bench()
    assert other.tiers.residency(a) is Residency.DISK
    other.lease(a).release()
    assert shelf.fetched == ["a"]


def test_a_load_in_flight_is_not_begun_again(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    shelf.gates["a"] = threading.Event()
    for _ in range(20):
        b.tiers.request(a)
        b.tiers.pin(a)
        b.tiers.advance()
    shelf.gates["a"].set()
    b.load(a)
    assert shelf.fetched == ["a"]


def test_a_release_counts_once(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    one, two = b.lease(a), b.lease(a)
    assert one.slot == two.slot
    one.release()
    one.release()
    assert b.report()["a"][1] == 1


def test_two_versions_of_one_adapter_live_side_by_side(shelf, bench):
    old, other = make(shelf, "ab")
    new = AdapterRef(old.tenant, old.name, 2, other.digest)
    b = bench()
    first, second = b.lease(old), b.lease(new)
    assert first.slot != second.slot
    shelf.check(old, b.tiers.weights, first.slot)


# Slow sources.


def test_a_hanging_source_delays_only_its_own_adapters(shelf, bench):
    slow, warm, quick = make(shelf, "ABCDEFGHIJ"), make(shelf, "ab"), make(shelf, "cd")
    b = bench(gpu=12)
    b.load(*warm)
    b = bench(gpu=12)  # has them on disk
    for ref in slow[:6]:  # two download threads are left
        shelf.gates[ref.name] = threading.Event()
    longest_s = 0.0
    for ref in (*slow[:6], *warm, *quick):
        b.tiers.request(ref)
    leased: set[str] = set()

    def all_leased() -> bool:
        nonlocal longest_s
        begin_s = time.monotonic()
        b.tiers.advance()
        b.tiers.adapters()
        for ref in (*slow, *warm, *quick):
            b.tiers.request(ref)
            b.tiers.residency(ref)
            if b.tiers.lease(ref):
                leased.add(ref.name)
        longest_s = max(longest_s, time.monotonic() - begin_s)
        return leased >= {"a", "b", "c", "d"}

    until(all_leased, b.woken)
    assert not leased & {ref.name for ref in slow[:6]}
    # The source hangs for ever; a step that waited for it would not return.
    assert longest_s < 5.0


def test_with_every_download_thread_stuck_adapters_on_disk_still_load(shelf, bench):
    slow, warm = make(shelf, "ABCDEFGHIJKLMNOP"), make(shelf, "a")
    bench().load(*warm)
    b = bench()
    for ref in slow:
        shelf.gates[ref.name] = threading.Event()
        b.tiers.request(ref)
    b.lease(warm[0]).release()


def test_hanging_pins_leave_threads_for_requests(shelf, bench):
    slow, quick = make(shelf, "ABCDEFGHIJKLMNOP"), make(shelf, "a")
    b = bench()
    for ref in slow:
        shelf.gates[ref.name] = threading.Event()
        b.tiers.pin(ref)
    b.tiers.advance()
    b.lease(quick[0]).release()


def test_close_does_not_wait_for_a_source_that_hangs(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    shelf.gates["a"] = threading.Event()
    b.tiers.request(a)
    begin_s = time.monotonic()
    b.tiers.close()
    assert time.monotonic() - begin_s < 8.0


# Failures.


def test_a_damaged_download_fails_its_adapter_only_and_leaves_nothing(shelf, bench, tmp_path):
    bad, good = make(shelf, "ab")
    b = bench()
    shelf.spoil.add("a")
    b.tiers.request(good)
    error = b.failure(bad)
    assert isinstance(error, AdapterLoadFailed)
    assert "damaged" in str(error)
    assert error.adapter == "acme/a@1"
    assert error.retry_after_s > 60  # it stays damaged until an admin repairs it
    b.lease(good).release()
    image = b.image(good)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {good.digest, image.name}
    assert b.gpu.used_bytes == SIZE * 4
    assert set(b.report()) == {"b"}


def test_a_failure_is_raised_once_and_the_next_request_tries_again(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    shelf.errors["a"] = ConnectionError("the bucket does not answer")
    error = b.failure(a)
    assert "acme/a@1: its weights could not be brought" in str(error)
    assert error.retry_after_s == 10
    assert b.tiers.lease(a) is None
    del shelf.errors["a"]
    b.lease(a).release()
    assert shelf.fetched == ["a", "a"]


def test_a_load_queued_behind_a_hanging_source_fails_with_it(shelf, bench, monkeypatch):
    monkeypatch.setattr(loader, "_SOURCE_HANGS_S", 0.0)
    refs = make(shelf, "ABCDEFGHIJKLMNOPQRST")
    b, opened = bench(), threading.Event()
    for ref in refs:
        shelf.gates[ref.name] = opened
        shelf.errors[ref.name] = TimeoutError("no byte has come")
        b.tiers.request(ref)
    while len(shelf.fetched) < loader._DOWNLOADERS:
        time.sleep(0.01)
    opened.set()
    for ref in refs:
        assert "TimeoutError" in b.failure(ref).message
    assert len(shelf.fetched) == loader._DOWNLOADERS
    shelf.errors.clear()
    b.load(refs[-1])  # a later request is an attempt of its own


def test_a_download_that_hangs_while_others_succeed_is_its_adapters_own_fault(
    shelf, bench, monkeypatch
):
    monkeypatch.setattr(loader, "_SOURCE_HANGS_S", 0.0)
    monkeypatch.setattr(loader, "_DOWNLOADERS", 2)
    hung, a, b, c, d = make(shelf, "habcd")
    driver = bench()
    shelf.gates = {"h": threading.Event(), "b": threading.Event()}
    shelf.errors["h"] = TimeoutError("no byte has come")
    driver.tiers.request(hung)
    while shelf.fetched != ["h"]:
        time.sleep(0.01)
    driver.load(a, to=Residency.DISK)
    for ref in (b, c, d):  # b takes the other thread, so c and d wait
        driver.tiers.request(ref)
    while "b" not in shelf.fetched:
        time.sleep(0.01)
    shelf.gates["h"].set()
    assert driver.failure(hung).fault is LoadFault.ADAPTER
    shelf.gates["b"].set()
    driver.load(b, c, d, to=Residency.DISK)


def test_a_source_that_hangs_for_all_is_named_as_the_fault(shelf, bench, monkeypatch):
    monkeypatch.setattr(loader, "_SOURCE_HANGS_S", 0.0)
    refs = make(shelf, "ab")
    driver = bench()
    shelf.errors = dict.fromkeys("ab", ConnectionError("the bucket does not answer"))
    assert [driver.failure(ref).fault for ref in refs] == [LoadFault.STORE] * 2


def test_a_blob_that_the_source_refuses_at_once_is_its_adapters_own_fault(shelf, bench):
    (a,) = make(shelf, "a")
    shelf.errors["a"] = PermissionError("403 on this object")
    assert bench().failure(a).fault is LoadFault.ADAPTER


def test_a_damaged_blob_of_the_store_is_its_adapters_own_fault(shelf, bench):
    (a,) = make(shelf, "a")
    shelf.spoil.add("a")
    assert "fault" not in bench().failure(a).fields


def test_a_fast_failure_fails_no_load_queued_behind_it(shelf, bench):
    refs = make(shelf, "ABCDEFGHIJKLMNOPQRST")
    b = bench()
    for ref in refs:
        shelf.errors[ref.name] = KeyError("no such blob")
        b.tiers.request(ref)
    for ref in refs:
        assert "KeyError" in b.failure(ref).message
    assert len(shelf.fetched) == len(refs)


def test_a_tenant_with_many_cold_adapters_delays_others_by_one_round(shelf, bench):
    names, opened, later = "ABCDEFGHIJKLMNOPQRST", threading.Event(), threading.Event()
    many, other = make(shelf, names), replace(make(shelf, "z")[0], tenant="globex")
    shelf.gates = dict.fromkeys(names, opened)
    b = bench()
    for ref in many:
        b.tiers.request(ref)
    while len(shelf.fetched) < loader._DOWNLOADERS:
        time.sleep(0.01)
    b.tiers.request(other)
    shelf.gates |= dict.fromkeys(set(names) - set(shelf.fetched), later)
    opened.set()
    b.load(other, to=Residency.HOST)  # while the many's next turn holds all that it can
    assert "z" in shelf.fetched
    later.set()
    until(lambda: len(shelf.fetched) == len(many) + 1, b.woken)


needs_memory_files = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no Linux")


def full_for(shelf, b, *refs):
    """Make the next download of these blobs find the disk full."""
    for ref in refs:
        (b.folder / f"{ref.digest}.part").symlink_to("/dev/full")


@needs_memory_files
def test_a_blob_that_a_full_disk_cannot_take_is_loaded_without_the_disk(shelf, bench, caplog):
    refs = make(shelf, "abc")
    b = bench()
    full_for(shelf, b, *refs)
    for ref in refs:
        b.tiers.request(ref)
    for ref in refs:
        b.lease(ref).release()  # the numbers are compared there
    assert caplog.text.count("disk_left_out") == 3
    assert sorted(shelf.fetched) == [*"aabbcc"]


@needs_memory_files
def test_a_blob_loaded_without_the_disk_is_fetched_again_after_its_eviction(shelf, bench):
    a, other = make(shelf, "ab")
    b = bench(gpu=1, host=1)
    full_for(shelf, b, a)
    b.lease(a).release()
    b.image(a).unlink()  # as if the disk had had no room for that either
    b.lease(other).release()
    b.lease(a).release()
    assert shelf.fetched.count("a") == 3


@needs_memory_files
def test_a_blob_that_others_keep_removing_is_loaded_without_the_disk(shelf, bench, monkeypatch):
    (a,) = make(shelf, "a")

    def gone(cache, digest):
        raise FileNotFoundError(digest)

    monkeypatch.setattr(DiskCache, "blob", gone)
    bench().lease(a).release()
    assert len(shelf.fetched) == loader._DOWNLOADS + 1


@needs_memory_files
def test_a_damaged_blob_is_also_refused_without_the_disk(shelf, bench):
    (a,) = make(shelf, "a")
    shelf.spoil.add("a")
    b = bench()
    full_for(shelf, b, a)
    assert "the stored blob is damaged" in b.failure(a).message
    assert len(shelf.fetched) == 2


@needs_memory_files
def test_without_the_disk_one_blob_at_a_time_is_in_memory(shelf, bench, monkeypatch):
    refs, at_once, most = make(shelf, "abcd"), [], []

    def fetch_to(cache, ref, path, fetch=DiskCache.fetch_to):
        at_once.append(ref)
        most.append(len(at_once))
        time.sleep(0.05)
        fetch(cache, ref, path)
        at_once.remove(ref)

    def no_room(cache, ref):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskCache, "fetch_to", fetch_to)
    monkeypatch.setattr(DiskCache, "fetch", no_room)
    b = bench()
    b.load(*refs)
    assert most == [1, 1, 1, 1]


def test_a_failure_says_whether_this_machines_disk_is_the_cause(shelf, bench):
    full, refused = make(shelf, "ab")
    shelf.errors["a"] = RuntimeError("the store's own error")
    shelf.errors["a"].__cause__ = OSError(errno.ENOSPC, "no space left on device")
    shelf.errors["b"] = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    b = bench()
    assert b.failure(full).fault is LoadFault.DISK
    assert b.failure(refused).fault is LoadFault.ADAPTER


def test_a_failure_names_its_kind_and_only_the_log_has_details(shelf, bench, caplog):
    (a,) = make(shelf, "a")
    shelf.errors["a"] = ConnectionError("no object in /srv/catalog")
    error = bench().failure(a)
    assert "ConnectionError" in error.message
    assert "/srv/catalog" not in str(error)
    assert "/srv/catalog" in caplog.text


def test_a_pending_failure_keeps_requests_from_trying_again(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    shelf.errors["a"] = ConnectionError("no")
    b.tiers.request(a)
    b.woken.wait(5)
    b.woken.clear()
    for _ in range(3):
        b.tiers.advance()
        b.tiers.request(a)
    assert not b.woken.wait(0.2)
    assert shelf.fetched == ["a"]


def test_an_adapter_of_another_base_model_fails_by_name(shelf, bench):
    ref = shelf.make("a", {(0, 0): 4}, shape=replace(SHAPE, hidden=24))
    error = bench().failure(ref)
    assert isinstance(error, AdapterLoadFailed)
    assert error.field == "model.layers.0.self_attn.q_proj"
    assert error.retry_after_s > 60


@pytest.mark.parametrize("ranks", [everywhere(17), everywhere(16)])
def test_an_adapter_over_a_limit_or_the_arena_is_too_large(ranks, shelf, bench):
    ref, small = shelf.make("big", ranks), shelf.make("a", ONE)
    b = bench(gpu=3)  # room for rank 12
    assert isinstance(b.failure(ref), AdapterTooLarge)
    b.lease(small).release()
