"""Pins keep adapters, but never against a request that needs the memory."""

import pytest

from lorikeet_engine.adapter import Residency
from lorikeet_engine.residency import pins
from tests.engine.blobs import everywhere
from tests.engine.residency.tiers_driver import SIZE, make
from tests.waiting import eventually


@pytest.mark.parametrize("tier", [Residency.DISK, Residency.HOST, Residency.GPU])
def test_a_pin_preloads_and_holds_under_pressure_until_unpinned(tier, shelf, bench):
    pinned, *others = make(shelf, "pabcdef")
    b = bench(gpu=2, host=2)
    b.tiers.pin(pinned, tier)
    b.until(lambda: b.tiers.residency(pinned) is tier)
    assert b.report()["p"] == (tier, 0, True)
    for ref in others * 2:
        b.lease(ref).release()
        assert b.tiers.residency(pinned) >= tier
    b.tiers.unpin(pinned.digest)
    for ref in others:
        b.lease(ref).release()
    assert b.tiers.residency(pinned) is Residency.DISK
    assert not b.report()["p"][2]


def test_a_pinned_adapter_can_be_leased_like_any_other(shelf, bench):
    pinned, *others = make(shelf, "pab")
    b = bench(gpu=2)
    b.tiers.pin(pinned)
    b.until(lambda: b.tiers.residency(pinned) is Residency.GPU)
    lease = b.lease(pinned)
    for ref in others:
        b.lease(ref).release()
    shelf.check(pinned, b.tiers.weights, lease.slot)


def test_a_passing_pin_keeps_the_blob_on_the_disk_which_the_store_may_lack(shelf, bench):
    pushed, *others = make(shelf, "pabcdef")
    b = bench(disk_bytes=3 * shelf.blob("p").stat().st_size)
    b.tiers.pin(pushed, Residency.HOST, passing=True)
    b.until(lambda: b.tiers.residency(pushed) is Residency.HOST)
    assert eventually(lambda: b.tiers._disk._pins._held)
    for ref in others:
        b.lease(ref).release()
    assert (b.folder / pushed.digest).exists()
    b.tiers.unpin(pushed.digest)
    b.tiers.advance()
    assert eventually(lambda: not b.tiers._disk._pins._held)


def test_pins_never_fill_the_arena_against_requests(shelf, bench):
    refs, large = make(shelf, "abcd"), shelf.make("large", everywhere(10))
    b = bench(gpu=4)
    for ref in refs:
        b.tiers.pin(ref)
        b.until(lambda ref=ref: b.tiers.residency(ref) is Residency.GPU)
    b.lease(large).release()
    kept = [ref for ref in refs if b.tiers.residency(ref) is Residency.GPU]
    assert kept == refs[: len(kept)]
    assert len(kept) == 1  # the others' place is needed: 10 + 4 + 4 > 16
    assert all(pinned for _, _, pinned in (b.report()[ref.name] for ref in refs))


def test_pins_can_take_the_memory_that_the_largest_requested_adapter_leaves(shelf, bench):
    large, *refs = shelf.make("large", everywhere(8)), *make(shelf, "abcd")
    b = bench(gpu=4, host=4)
    assert {tier: pinnable_images(b, tier) for tier in (Residency.GPU, Residency.HOST)} == {
        Residency.GPU: 4,
        Residency.HOST: 4,
    }
    b.lease(large).release()
    assert pinnable_images(b, Residency.GPU) == 2
    for ref in refs:
        b.tiers.pin(ref)
    b.until(lambda: sum(b.tiers.residency(ref) is Residency.GPU for ref in refs) == 2)
    b.lease(large).release()
    kept = [ref for ref in refs if b.tiers.residency(ref) is Residency.GPU]
    assert len(kept) == 2


def pinnable_images(b, tier):
    return b.tiers.status()[tier].pinnable_bytes / (SIZE * 4)


def test_pins_leave_one_slot_to_requests(shelf, bench):
    *pinned, ref = make(shelf, "abc")
    b = bench(gpu=4, slots=2)
    for one in pinned:
        b.tiers.pin(one)
    b.until(lambda: any(b.tiers.residency(one) is Residency.GPU for one in pinned))
    b.lease(ref).release()


def test_a_pin_on_the_host_gives_way_to_a_request_that_needs_the_memory(shelf, bench):
    a, b_, large = *make(shelf, "ab"), shelf.make("large", everywhere(12))
    b = bench(gpu=4, host=4)
    for ref in (a, b_):
        b.tiers.pin(ref, Residency.HOST)
        b.until(lambda ref=ref: b.tiers.residency(ref) is Residency.HOST)
    b.lease(large).release()
    assert b.tiers.residency(a) is Residency.HOST


def test_a_pin_whose_load_fails_is_tried_again(shelf, bench, monkeypatch):
    monkeypatch.setattr(pins, "RETRY_S", 0.1)
    (a,) = make(shelf, "a")
    b = bench()
    shelf.errors["a"] = ConnectionError("no")
    b.tiers.pin(a)
    b.until(lambda: len(shelf.fetched) >= 2)
    del shelf.errors["a"]
    b.until(lambda: b.tiers.residency(a) is Residency.GPU)
    assert b.tiers.lease(a) is not None


def test_a_failure_is_forgotten_once_a_pin_has_loaded_the_adapter(shelf, bench, monkeypatch):
    monkeypatch.setattr(pins, "RETRY_S", 0.1)
    (a,) = make(shelf, "a")
    b = bench()
    shelf.errors["a"] = ConnectionError("no")
    b.tiers.request(a)  # by a request that leaves before it is told
    b.until(lambda: not b.tiers._requests._waiting)
    del shelf.errors["a"]
    b.tiers.pin(a)
    b.until(lambda: b.tiers.residency(a) is Residency.GPU)
    assert b.tiers.lease(a) is not None


def test_a_pin_can_move_to_another_tier(shelf, bench):
    pinned, *others = make(shelf, "pabc")
    b = bench(gpu=1, host=2)
    b.tiers.pin(pinned, Residency.DISK)
    b.until(lambda: b.tiers.residency(pinned) is Residency.DISK)
    b.tiers.pin(pinned, Residency.HOST)
    b.until(lambda: b.tiers.residency(pinned) is Residency.HOST)
    for ref in others:
        b.lease(ref).release()
        assert b.tiers.residency(pinned) is Residency.HOST
