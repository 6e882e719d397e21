"""A prefetch takes what nobody else wants, once."""

import threading
import time

import pytest

from lorikeet_engine.adapter import Residency
from lorikeet_engine.residency import prefetches
from tests.engine.blobs import everywhere
from tests.engine.residency.tiers_driver import SIZE, make


def use(b, ref, times=1):
    for _ in range(times):
        b.lease(ref).release()


def settled(b, *refs, at=Residency.HOST):
    """Wait until the prefetches of these have had their one try."""
    b.until(lambda: all(b.tiers.residency(ref) >= at for ref in refs))
    b.tiers.advance()


def downloading(b, ref):
    """Step until its download has begun, of which nobody tells the engine."""
    while ref.name not in b.shelf.fetched:
        b.tiers.advance()
        time.sleep(0.001)


@pytest.mark.parametrize("tier", [Residency.DISK, Residency.HOST, Residency.GPU])
def test_it_goes_as_far_as_was_asked(tier, shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    b.tiers.prefetch(a, tier)
    settled(b, a, at=tier)
    assert b.tiers.residency(a) is tier
    if tier is Residency.GPU:
        shelf.check(a, b.tiers.weights, b.lease(a).slot)


def test_it_goes_on_from_where_the_adapter_is(shelf, bench):
    a, b_ = make(shelf, "ab")
    b = bench()
    b.load(b_)
    for ref, tier in ((a, Residency.HOST), (a, Residency.GPU), (b_, Residency.GPU)):
        b.tiers.prefetch(ref, tier)
        settled(b, ref, at=tier)
    assert shelf.fetched == ["b", "a"]


def test_what_was_never_used_takes_free_room_only(shelf, bench):
    used, never = make(shelf, "ab")
    b = bench(gpu=1)
    use(b, used)
    b.tiers.prefetch(never)
    settled(b, never)
    assert b.tiers.residency(never) is Residency.HOST
    assert b.tiers.residency(used) is Residency.GPU


def test_it_takes_the_place_of_what_scores_lower(shelf, bench):
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


def test_every_one_that_would_have_to_go_must_score_lower(shelf, bench):
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
def test_what_is_held_stays_whatever_its_score(held, shelf, bench, monkeypatch):
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


def test_what_is_pinned_stays_whatever_its_score(shelf, bench):
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


def test_it_takes_no_room_while_a_request_waits_for_some_and_is_not_tried_again(shelf, bench):
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


def test_it_is_loaded_behind_pins(shelf, bench):
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


def test_it_leaves_the_threads_to_requests(shelf, bench):
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


def test_it_is_not_loaded_while_a_request_waits_for_room_on_the_host(shelf, bench):
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


def test_one_whose_load_fails_is_forgotten(shelf, bench):
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


def test_only_the_last_ones_asked_for_wait(shelf, bench, monkeypatch):
    monkeypatch.setattr(prefetches, "_MAX_WAITING", 2)
    refs = make(shelf, "abcd")
    b = bench()
    for ref in refs:
        b.tiers.prefetch(ref)
    settled(b, *refs[2:], at=Residency.GPU)
    assert sorted(shelf.fetched) == ["c", "d"]


def test_a_request_makes_its_load_urgent(shelf, bench):
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


def test_a_request_takes_the_load_of_a_disk_pin_further(shelf, bench):
    (a,) = make(shelf, "a")
    shelf.gates["a"] = threading.Event()
    b = bench()
    b.tiers.pin(a, Residency.DISK)
    downloading(b, a)
    b.tiers.request(a)
    shelf.gates["a"].set()
    use(b, a)


def test_it_is_no_use_of_the_adapter(shelf, bench):
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


def test_what_is_used_more_elsewhere_takes_the_place_of_what_is_used_less_here(shelf, bench):
    here, elsewhere = make(shelf, "ab")
    b = bench(gpu=1)
    use(b, here, times=3)
    b.tiers.prefetch(elsewhere, Residency.GPU, 2.0)
    settled(b, elsewhere)
    assert b.tiers.residency(here) is Residency.GPU
    b.tiers.prefetch(elsewhere, Residency.GPU, 4.0)
    settled(b, elsewhere, at=Residency.GPU)
    assert b.tiers.residency(here) is Residency.HOST


def test_until_it_is_used_it_keeps_its_place_by_that(shelf, bench):
    rare, elsewhere, new = make(shelf, "abn")
    b = bench(gpu=2)
    use(b, rare)
    b.tiers.prefetch(elsewhere, Residency.GPU, 2.0)
    settled(b, elsewhere, at=Residency.GPU)
    use(b, new)
    assert b.tiers.residency(rare) is Residency.HOST
    assert b.tiers.residency(elsewhere) is Residency.GPU
