"""Prefetches take only unneeded capacity, and are tried once."""

import threading
import time

import pytest

from lorikeet_engine.adapter import Residency
from lorikeet_engine.errors import AdapterMissing
from lorikeet_engine.residency import prefetches
from tests.engine.blobs import everywhere
from tests.engine.residency.tiers_driver import SIZE, make


def use(b, ref, times=1):
    for _ in range(times):
        b.lease(ref).release()


def settled(b, *refs, at=Residency.HOST):
    """Wait until these prefetches were tried."""
    b.until(lambda: all(b.tiers.residency(ref) >= at for ref in refs))
    b.tiers.advance()


def downloading(b, ref):
    """Step until the download has begun, which wakes no engine."""
    while ref.name not in b.shelf.fetched:
        b.tiers.advance()
        time.sleep(0.001)


@pytest.mark.parametrize("tier", [Residency.DISK, Residency.HOST, Residency.GPU])
def test_a_prefetch_loads_up_to_its_tier(tier, shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    b.tiers.prefetch(a, tier)
    settled(b, a, at=tier)
    assert b.tiers.residency(a) is tier
    if tier is Residency.GPU:
        shelf.check(a, b.tiers.weights, b.lease(a).slot)


def test_a_prefetch_starts_from_the_adapters_tier(shelf, bench):
    a, b_ = make(shelf, "ab")
    b = bench()
    b.load(b_)
    for ref, tier in ((a, Residency.HOST), (a, Residency.GPU), (b_, Residency.GPU)):
        b.tiers.prefetch(ref, tier)
        settled(b, ref, at=tier)
    assert shelf.fetched == ["b", "a"]


def test_a_prefetch_of_a_never_used_adapter_evicts_nothing(shelf, bench):
    used, never = make(shelf, "ab")
    b = bench(gpu=1)
    use(b, used)
    b.tiers.prefetch(never)
    settled(b, never)
    assert b.tiers.residency(never) is Residency.HOST
    assert b.tiers.residency(used) is Residency.GPU


def test_a_prefetch_evicts_an_adapter_with_a_lower_score(shelf, bench):
    often, once = make(shelf, "ab")
    b = bench(gpu=1)
    use(b, often, times=3)
    use(b, once)
    b.tiers.prefetch(often)
    settled(b, often, at=Residency.GPU)
    assert b.tiers.residency(once) is Residency.HOST
    (report,) = [report for report in b.tiers.adapters() if report.ref == once]
    assert (report.gpu_bytes, report.image_bytes) == (0, SIZE * 4)
    assert report.uses == pytest.approx(1.0, abs=0.1)
    b.tiers.prefetch(once)
    settled(b, once)
    assert b.tiers.residency(often) is Residency.GPU


def test_a_prefetch_evicts_nothing_unless_all_victims_score_lower(shelf, bench):
    rare, often = make(shelf, "ab")
    large = shelf.make("large", everywhere(8))
    b = bench(gpu=2)
    use(b, large, times=3)
    use(b, rare)
    use(b, often, times=9)
    b.tiers.prefetch(large)
    settled(b, large)
    assert b.tiers.residency(rare) is Residency.GPU
    assert b.tiers.residency(often) is Residency.GPU


@pytest.mark.parametrize("held", ["lease", "guard"])
def test_a_prefetch_never_evicts_a_held_adapter(held, shelf, bench, monkeypatch):
    monkeypatch.setattr(
        "lorikeet_engine.residency.gpu.adapters.GUARD_S", 60.0 if held == "guard" else 0.01
    )
    often, holder = make(shelf, "ab")
    b = bench(gpu=1)
    use(b, often, times=9)
    b.load(holder)
    lease = b.tiers.lease(holder) if held == "lease" else None
    b.tiers.prefetch(often)
    settled(b, often)
    assert b.tiers.residency(holder) is Residency.GPU
    if lease is not None:
        shelf.check(holder, b.tiers.weights, lease.slot)


def test_a_prefetch_never_evicts_a_pinned_adapter(shelf, bench):
    often, pinned, *others = make(shelf, "opxy")
    b = bench(gpu=2)
    use(b, often, times=9)
    leases = [b.lease(ref) for ref in others]
    leases.pop().release()
    b.tiers.pin(pinned)
    settled(b, pinned, at=Residency.GPU)
    b.tiers.prefetch(often)
    settled(b, often)
    assert b.tiers.residency(pinned) is Residency.GPU


def test_a_prefetch_is_given_up_while_a_request_waits_for_gpu_memory(shelf, bench):
    leased, a = make(shelf, "la")
    large = shelf.make("large", everywhere(8))
    b = bench(gpu=2)
    lease = b.lease(leased)
    b.load(large, to=Residency.HOST)
    b.tiers.advance()
    b.tiers.prefetch(a)
    settled(b, a)
    assert b.tiers.residency(a) is Residency.HOST
    lease.release()
    use(b, large)
    b.tiers.advance()
    assert b.tiers.residency(a) is Residency.HOST


def test_a_prefetch_is_loaded_after_pins(shelf, bench):
    pinned, a = make(shelf, "pa")
    shelf.gates["p"] = threading.Event()
    b = bench()
    b.tiers.pin(pinned)
    b.tiers.prefetch(a)
    b.tiers.advance()
    assert b.tiers._prefetches._waiting
    shelf.gates["p"].set()
    settled(b, pinned, a, at=Residency.GPU)
    assert shelf.fetched == ["p", "a"]


def test_prefetches_leave_threads_for_requests(shelf, bench):
    refs, (wanted,) = make(shelf, "abcdefghijkl"), make(shelf, "w")
    for ref in refs:
        shelf.gates[ref.name] = threading.Event()
    b = bench(gpu=16, host=16, slots=16)
    for ref in refs:
        b.tiers.prefetch(ref)
    b.load(wanted)
    assert set(shelf.fetched) <= {"a", "b", "w"}
    for gate in shelf.gates.values():
        gate.set()
    settled(b, *refs, at=Residency.GPU)


def test_a_prefetch_is_not_loaded_while_a_request_waits_for_host_memory(shelf, bench):
    leased, first, second, a = make(shelf, "lfsa")
    b = bench(gpu=1, host=1)
    lease = b.lease(leased)
    b.load(first, to=Residency.HOST)
    b.load(second, to=Residency.DISK)
    b.tiers.prefetch(a)
    for _ in range(20):
        b.tiers.advance()
        b.woken.wait(0.005)
    assert b.tiers.residency(a) is Residency.REMOTE
    lease.release()
    for ref in (first, second):
        use(b, ref)
    settled(b, a, at=Residency.DISK)


def test_a_prefetch_whose_load_fails_is_forgotten(shelf, bench):
    a, b_ = make(shelf, "ab")
    shelf.errors["a"] = ConnectionError("no")
    b = bench()
    b.tiers.prefetch(a)
    b.tiers.prefetch(b_)
    settled(b, b_, at=Residency.GPU)
    b.until(lambda: not b.tiers._prefetches._loading)
    b.tiers.advance()
    assert sorted(shelf.fetched) == ["a", "b"]
    del shelf.errors["a"]
    use(b, a)  # nor does the failure stand in a request's way


def test_a_prefetch_of_an_ended_version_is_no_failed_load(shelf, bench, caplog):
    ended, other = make(shelf, "eo")
    shelf.errors["e"] = AdapterMissing("the store has no such weights")
    b = bench()
    b.tiers.prefetch(ended)
    b.tiers.prefetch(other)
    settled(b, other, at=Residency.GPU)
    b.until(lambda: not b.tiers._prefetches._loading)
    assert shelf.fetched.count("e") == 1
    assert b.tiers.load_failures == 0
    assert not [each for each in caplog.records if each.msg == "adapter_failed"]


@pytest.mark.parametrize("user", ["request", "pin"])
def test_a_lost_blob_that_a_prefetch_and_others_need_is_a_failed_load(user, shelf, bench):
    (lost,) = make(shelf, "l")
    shelf.errors["l"] = AdapterMissing("the store has no such weights")
    shelf.gates["l"] = threading.Event()
    b = bench()
    b.tiers.prefetch(lost)
    downloading(b, lost)
    if user == "request":
        b.tiers.request(lost)
    else:
        b.tiers.pin(lost)
        b.tiers.advance()
    shelf.gates["l"].set()
    if user == "request":
        assert "has no such weights" in str(b.failure(lost))
    b.until(lambda: b.tiers.load_failures > 0)


def test_the_oldest_waiting_prefetch_is_forgotten_beyond_the_limit(shelf, bench, monkeypatch):
    monkeypatch.setattr(prefetches, "_MAX_WAITING", 2)
    refs = make(shelf, "abcd")
    b = bench()
    for ref in refs:
        b.tiers.prefetch(ref)
    settled(b, *refs[2:], at=Residency.GPU)
    assert sorted(shelf.fetched) == ["c", "d"]


def test_a_request_makes_a_prefetchs_load_urgent(shelf, bench):
    pinned, a = make(shelf, "pa")
    shelf.gates["a"] = threading.Event()
    b = bench(gpu=2, host=1)
    b.tiers.pin(pinned, Residency.HOST)
    settled(b, pinned)
    b.tiers.prefetch(a)
    downloading(b, a)
    b.tiers.request(a)
    shelf.gates["a"].set()
    use(b, a)  # though the host is full of pins, which give way to requests alone


def test_a_request_extends_the_load_of_a_disk_pin(shelf, bench):
    (a,) = make(shelf, "a")
    shelf.gates["a"] = threading.Event()
    b = bench()
    b.tiers.pin(a, Residency.DISK)
    downloading(b, a)
    b.tiers.request(a)
    shelf.gates["a"].set()
    use(b, a)


def test_a_prefetch_does_not_count_as_a_use(shelf, bench):
    used, prefetched, new = make(shelf, "upn")
    b = bench(gpu=2)
    use(b, used)
    b.tiers.prefetch(prefetched)
    settled(b, prefetched, at=Residency.GPU)
    reports = {report.ref.name: report for report in b.tiers.adapters()}
    assert reports["p"].uses == 0.0
    assert reports["u"].uses == pytest.approx(1.0, abs=0.1)
    assert reports["p"].image_bytes == reports["p"].gpu_bytes == SIZE * 4
    use(b, new)
    assert b.tiers.residency(prefetched) is Residency.HOST
    assert b.tiers.residency(used) is Residency.GPU


def test_a_prefetch_used_more_elsewhere_evicts_an_adapter_used_less_here(shelf, bench):
    here, elsewhere = make(shelf, "ab")
    b = bench(gpu=1)
    use(b, here, times=3)
    b.tiers.prefetch(elsewhere, Residency.GPU, 2.0)
    settled(b, elsewhere)
    assert b.tiers.residency(here) is Residency.GPU
    b.tiers.prefetch(elsewhere, Residency.GPU, 4.0)
    settled(b, elsewhere, at=Residency.GPU)
    assert b.tiers.residency(here) is Residency.HOST


def test_a_prefetched_adapter_is_scored_by_its_uses_elsewhere(shelf, bench):
    rare, elsewhere, new = make(shelf, "abn")
    b = bench(gpu=2)
    use(b, rare)
    b.tiers.prefetch(elsewhere, Residency.GPU, 2.0)
    settled(b, elsewhere, at=Residency.GPU)
    use(b, new)
    assert b.tiers.residency(rare) is Residency.HOST
    assert b.tiers.residency(elsewhere) is Residency.GPU


def test_steps_in_which_no_adapter_moves_look_at_no_tier(shelf, bench, monkeypatch):
    a, c = make(shelf, "ac")
    b, moved = bench(gpu=2), list[float]()
    b.load(a)
    move = b.tiers._move
    monkeypatch.setattr(b.tiers, "_move", lambda at_s: moved.append(at_s) or move(at_s))
    b.until(lambda: b.tiers.advance() is None)  # nothing is left to do
    moved.clear()
    for _ in range(100):
        b.tiers.request(a)
        lease = b.tiers.lease(a)
        assert b.tiers.advance() is None
        lease.release()
    assert not moved
    b.tiers.prefetch(c)
    b.until(lambda: b.tiers.residency(c) is Residency.GPU)
    assert moved
