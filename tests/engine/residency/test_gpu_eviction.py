"""Eviction from the GPU and the host when they are full, and of transient adapters at once."""

from dataclasses import replace

from lorikeet_engine.adapter import Residency
from tests.engine.blobs import everywhere
from tests.engine.residency.tiers_driver import make

# Memory of the GPU.


def test_a_leased_adapter_is_never_evicted_and_others_wait_on_the_host(shelf, bench):
    a, b_, c = make(shelf, "abc")
    b = bench(gpu=2)
    one, two = b.lease(a), b.lease(b_)
    b.load(c, to=Residency.HOST)
    for _ in range(5):
        b.tiers.advance()
        assert b.tiers.lease(c) is None
    shelf.check(a, b.tiers.weights, one.slot)
    shelf.check(b_, b.tiers.weights, two.slot)
    one.release()
    b.tiers.advance()
    assert b.tiers.lease(c) is not None
    assert b.tiers.residency(a) is Residency.HOST
    shelf.check(b_, b.tiers.weights, two.slot)


def test_eviction_also_frees_slots(shelf, bench):
    refs = make(shelf, "abcd")
    b = bench(gpu=4, slots=2)
    for ref in refs:
        b.lease(ref).release()
    assert [b.tiers.residency(ref) for ref in refs].count(Residency.GPU) == 2


def test_a_small_adapter_passes_a_large_one_that_does_not_fit(shelf, bench):
    a, b_ = make(shelf, "ab")
    large, small = shelf.make("large", everywhere(12)), shelf.make("small", everywhere(2))
    b = bench(gpu=3)
    leases = [b.lease(a), b.lease(b_)]
    b.load(large, to=Residency.HOST)
    b.lease(small).release()
    assert b.tiers.residency(large) is Residency.HOST
    for lease in leases:
        lease.release()
    b.lease(large).release()


def test_a_requested_adapter_is_guarded_until_its_first_lease(shelf, bench, monkeypatch):
    monkeypatch.setattr("lorikeet_engine.residency.gpu.adapters.GUARD_S", 60.0)
    a, b_ = make(shelf, "ab")
    b = bench(gpu=1)
    b.load(a)
    b.load(b_, to=Residency.HOST)
    for _ in range(5):
        b.tiers.advance()
        assert b.tiers.residency(a) is Residency.GPU
    lease = b.tiers.lease(a)
    b.tiers.advance()
    assert b.tiers.residency(b_) is Residency.HOST
    lease.release()
    b.tiers.advance()
    assert b.tiers.residency(b_) is Residency.GPU


def test_the_least_used_adapter_is_evicted(shelf, bench):
    often, once, new = make(shelf, "abc")
    b = bench(gpu=2)
    for ref in (often, often, once, new):
        b.lease(ref).release()
    assert b.tiers.residency(often) is Residency.GPU
    assert b.tiers.residency(once) is Residency.HOST


def test_a_reloaded_adapter_keeps_its_uses(shelf, bench):
    a, b_, c, d = make(shelf, "abcd")
    b = bench(gpu=2)
    for ref in (a, a, a, b_, b_, b_, c):
        b.lease(ref).release()
    assert b.tiers.residency(a) is Residency.HOST
    for ref in (a, d):
        b.lease(ref).release()
    assert b.tiers.residency(a) is Residency.GPU
    assert b.tiers.residency(b_) is Residency.HOST


def test_a_guard_without_a_lease_ends(shelf, bench, monkeypatch):
    monkeypatch.setattr("lorikeet_engine.residency.gpu.adapters.GUARD_S", 0.2)
    a, b_ = make(shelf, "ab")
    b = bench(gpu=1)
    b.load(a)
    b.lease(b_).release()  # only the end of the guard wakes this engine
    assert b.tiers.residency(a) is Residency.HOST


def test_a_second_request_does_not_extend_the_guard(shelf, bench, monkeypatch):
    monkeypatch.setattr("lorikeet_engine.residency.gpu.adapters.GUARD_S", 0.1)
    a, b_ = make(shelf, "ab")
    b = bench(gpu=1)
    b.load(a)
    b.tiers.request(b_)

    def other_arrived() -> bool:
        b.tiers.request(a)
        return b.tiers.residency(b_) is Residency.GPU

    b.until(other_arrived)


def test_adapters_waiting_for_one_slot_all_get_it_in_turn(shelf, bench):
    refs = make(shelf, "abcdefgh")
    b = bench(gpu=1, host=3)
    waiting = list(refs)

    def step() -> bool:
        for ref in waiting:
            b.tiers.request(ref)
        for ref in list(waiting):
            lease = b.tiers.lease(ref)
            if lease is not None:
                shelf.check(ref, b.tiers.weights, lease.slot)
                lease.release()
                waiting.remove(ref)
                b.woken.set()
        return not waiting

    b.until(step)


# Memory of the host.


def test_images_wait_on_disk_while_the_host_is_full_of_waiting_images(shelf, bench):
    refs = make(shelf, "abcde")
    b = bench(gpu=1, host=2)
    lease = b.lease(refs[0])
    for ref in refs[1:]:
        b.tiers.request(ref)
    waits_on = [Residency.HOST] * 2 + [Residency.DISK] * 2
    b.until(lambda: sorted(map(b.tiers.residency, refs[1:]), reverse=True) == waits_on)
    lease.release()
    for ref in sorted(refs[1:], key=b.tiers.residency, reverse=True):
        b.lease(ref).release()


def test_an_adapter_evicted_from_gpu_and_host_is_reloaded_from_disk(shelf, bench):
    refs = make(shelf, "abcdef")
    b = bench(gpu=1, host=1)
    for ref in refs * 2:
        b.lease(ref).release()
    assert b.tiers.residency(refs[0]) is Residency.DISK
    assert shelf.fetched == list("abcdef")


# Transient adapters.


def test_a_transient_adapter_is_forgotten_once_no_lease_holds_it(shelf, bench):
    plain, pinned, passing = make(shelf, "abc")
    pinned, passing = replace(pinned, transient=True), replace(passing, transient=True)
    b = bench()
    b.tiers.pin(pinned)
    for ref in (plain, pinned):
        b.lease(ref).release()
    lease = b.lease(passing)
    for ref in (plain, pinned, passing):
        b.tiers.forget(ref.digest)
    b.tiers.advance()
    shelf.check(passing, b.tiers.weights, lease.slot)
    lease.release()
    b.tiers.advance()
    kept = {"a": (Residency.GPU, 0, False), "b": (Residency.GPU, 0, True)}
    assert b.report() == kept
    assert b.tiers.residency(passing) is Residency.DISK
    assert (b.gpu.adapters, b.gpu.evictions) == (2, 0)
    assert b.tiers.status()[Residency.HOST].adapters == 2
    b.image(plain)
    assert not b.tiers._disk.has_image(passing.digest)


def test_a_transient_adapter_that_is_loading_is_forgotten_once_it_has_loaded(shelf, bench):
    (passing,) = make(shelf, "a")
    b = bench()
    b.tiers.request(replace(passing, transient=True))
    b.tiers.forget(passing.digest)
    b.until(lambda: not b.tiers._to_forget)
    assert shelf.fetched == ["a"]
    assert (b.gpu.adapters, b.tiers.status()[Residency.HOST].adapters) == (0, 0)
    assert b.report() == {}
    b.lease(passing).release()
    b.image(passing)
