"""Compositions: leased once all their adapters are on the GPU, or refused by name."""

import threading
import time
from dataclasses import replace

import pytest

from lorikeet_engine.adapter import MAX_MEMBERS, AdapterRef, Composition, Residency
from lorikeet_engine.errors import (
    AdapterLoadFailed,
    AdapterNotComposable,
    AdapterTooLarge,
    InvalidRequest,
)
from lorikeet_engine.residency.gpu.adapters import GUARD_S
from lorikeet_engine.residency.gpu.arena import MAX_COMPOSITIONS
from lorikeet_engine.residency.packed_image import PackedLayout
from tests.engine.blobs import SHAPE, everywhere
from tests.engine.residency.tiers_driver import LIMITS, TiersDriver, make, put


def composed(*refs: AdapterRef, weights: tuple[float, ...] = (0.5, -1.25)) -> Composition:
    return Composition(refs, weights[: len(refs)])


def lease(driver: TiersDriver, composition: Composition):
    driver.load(*composition.members)
    return driver.tiers.lease(composition)


def members_at(driver: TiersDriver, slot: int) -> dict[int, float]:
    """Weights of a composition's adapters on the GPU, by their slots."""
    weights = driver.tiers.weights
    assert weights.members is not None
    assert weights.member_weights is not None
    pairs = zip(weights.members[slot].tolist(), weights.member_weights[slot].tolist(), strict=True)
    return {member: weight for member, weight in pairs if member >= 0}


def test_a_composition_is_leased_once_all_its_adapters_are_on_the_gpu(shelf, bench):
    a, b_, c = make(shelf, "abc")
    b = bench()
    of_all = composed(a, b_, c, weights=(0.5, -1.25, 2.0))
    b.load(a, c)
    assert b.tiers.lease(of_all) is None
    assert not any(leases for _, leases, _ in b.report().values())
    held = lease(b, of_all)
    slots = {ref: b.lease(ref).slot for ref in (a, b_, c)}
    assert members_at(b, held.slot) == {slots[a]: 0.5, slots[b_]: -1.25, slots[c]: 2.0}
    assert held.rank == 3 * 4
    assert not b.tiers.weights.table[held.slot].any(), "kernels that know no compositions skip it"
    assert [leases for _, leases, _ in b.report().values()] == [2, 2, 2]
    held.release()
    held.release()
    assert [leases for _, leases, _ in b.report().values()] == [1, 1, 1]


def test_all_adapters_of_a_composition_load_at_once(shelf, bench):
    a, b_ = make(shelf, "ab")
    shelf.gates |= {"a": threading.Event(), "b": threading.Event()}
    b = bench()
    b.tiers.request(composed(a, b_))
    ends_s = time.monotonic() + 10.0
    while set(shelf.fetched) != {"a", "b"}:
        assert time.monotonic() < ends_s, "one waits for the other"
        time.sleep(0.001)
    for gate in shelf.gates.values():
        gate.set()
    b.until(lambda: b.tiers.residency(composed(a, b_)) is Residency.GPU)


def test_a_composition_is_as_far_as_its_farthest_adapter(shelf, bench):
    a, b_ = make(shelf, "ab")
    b = bench()
    b.load(a)
    both = composed(a, b_)
    assert b.tiers.residency(both) is Residency.REMOTE
    assert b.tiers.rank(both) is None
    assert b.tiers.load_s(both) == b.tiers.load_s(b_) > 0
    b.load(b_)
    assert b.tiers.residency(both) is Residency.GPU
    assert b.tiers.rank(both) == 8
    assert b.tiers.load_s(both) == 0
    assert b.tiers.loaded_at_s(both) == b.tiers.loaded_at_s(b_)


def test_adapters_of_a_leased_composition_are_not_evicted(shelf, bench):
    a, b_, c = make(shelf, "abc")
    b = bench(gpu=2)
    held = lease(b, composed(a, b_))
    b.load(c, to=Residency.HOST)
    for _ in range(5):
        b.tiers.advance()
    slots = members_at(b, held.slot)
    for ref, slot in zip(held_members(a, b_), slots, strict=True):
        shelf.check(ref, b.tiers.weights, slot)
    held.release()
    b.load(c)


def held_members(*refs: AdapterRef) -> tuple[AdapterRef, ...]:
    return composed(*refs).members


def test_equal_compositions_share_a_slot_in_whichever_order_they_are_named(shelf, bench):
    a, b_ = make(shelf, "ab")
    b = bench()
    one = lease(b, composed(a, b_))
    same = lease(b, composed(b_, a, weights=(-1.25, 0.5)))
    other = lease(b, composed(b_, a))
    assert one.slot == same.slot != other.slot
    one.release()
    again = lease(b, composed(a, b_))
    assert again.slot == same.slot, "it is still leased"


def test_slots_of_compositions_come_free(shelf, bench):
    (a,) = make(shelf, "a")
    b = bench()
    weights = [i / MAX_COMPOSITIONS for i in range(MAX_COMPOSITIONS + 1)]
    held = [lease(b, composed(a, weights=(weight,))) for weight in weights]
    assert held.pop() is None
    assert len({each.slot for each in held}) == MAX_COMPOSITIONS
    held[3].release()
    latest = lease(b, composed(a, weights=(-2.0,)))
    assert latest.slot == held[3].slot
    assert list(members_at(b, latest.slot).values()) == [-2.0]


def test_each_adapter_of_a_composition_is_used_and_counted(shelf, bench):
    a, b_ = make(shelf, "ab")
    b = bench()
    lease(b, composed(a, b_)).release()
    assert {use.ref: use.loads for use in b.tiers.take_use()} == {a: 1, b_: 1}
    assert all(b.tiers._gpu.uses(ref.digest) > 0.9 for ref in (a, b_))


def test_an_adapter_that_cannot_be_loaded_fails_its_compositions_by_name(shelf, bench):
    a, b_ = make(shelf, "ab")
    shelf.errors["b"] = OSError("lost")
    b = bench()
    error = b.failure(composed(a, b_))
    assert isinstance(error, AdapterLoadFailed)
    assert "acme/b@1" in error.message


OBSTACLES = {
    "DoRA or biases": {"vectors": frozenset({(0, 0)})},
    "matrices of experts": {"changes": {"changes_experts": True}},
    "trained tokens": {"ranks": {(SHAPE.outer_layer, SHAPE.index("embed_tokens_rows")): 3}},
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_an_adapter_that_is_more_than_a_and_b_is_refused_by_name(shelf, bench, obstacle):
    (a,) = make(shelf, "a")
    b, ref = bench(), AdapterRef("acme", "odd", 1, "f" * 64)
    kind = {"ranks": everywhere(4), "changes": {}, **OBSTACLES[obstacle]}
    ranks, changes = kind.pop("ranks"), kind.pop("changes")
    put(b.tiers._gpu, ref, replace(PackedLayout.of_ranks(ranks, SHAPE, **kind), **changes))
    b.load(a)
    with pytest.raises(AdapterNotComposable, match=f"acme/odd@1 .* has {obstacle}") as refused:
        b.tiers.lease(composed(a, ref))
    assert refused.value.adapter == "acme/odd@1"
    assert not any(adapter.leases for adapter in b.tiers._gpu.snapshot())


def test_ranks_that_add_up_to_too_many_are_refused(shelf, bench):
    a, b_ = (shelf.make(name, everywhere(rank)) for name, rank in (("a", 10), ("b", 7)))
    b = bench(gpu=20, host=20)
    with pytest.raises(AdapterTooLarge, match="add up to 17: the limit is 16;"):
        lease(b, composed(a, b_))
    assert LIMITS.max_rank == 16


def test_adapters_that_do_not_fit_together_are_refused(shelf, bench):
    refs = make(shelf, "abc")
    few, small = bench(gpu=2, slots=8), bench(gpu=4, slots=2)
    of_all = composed(*refs, weights=(1.0,) * 3)
    for driver in (few, small):
        for ref in refs:
            driver.load(ref)
        with pytest.raises(AdapterTooLarge, match="do not fit on the GPU together"):
            driver.tiers.lease(of_all)


def test_a_composition_keeps_its_adapters_while_the_last_waits_for_memory(shelf, bench):
    a, b_, c, d = make(shelf, "abcd")
    b = bench(gpu=2)
    now_s = [0.0]
    b.tiers._gpu._clock = b.tiers._compositions._clock = lambda: now_s[0]
    busy = b.lease(d)
    b.load(a)
    first, second = composed(a, b_), composed(a, c, weights=(1.0, 1.0))
    b.load(b_, c, to=Residency.HOST)
    for _ in range(8):
        now_s[0] += GUARD_S
        assert b.tiers.lease(first) is None
        assert b.tiers.lease(second) is None
        b.tiers.advance()
        assert b.tiers.residency(a) is Residency.GPU
    busy.release()
    for _ in range(4):  # c may take the memory first, and is guarded once
        now_s[0] += GUARD_S
        b.tiers.advance()
        if b.tiers.lease(first) is not None:
            return
    pytest.fail("a composition never gets all its adapters")


@pytest.mark.parametrize(
    ("count", "weights", "named"),
    [
        (0, (), "0 adapters"),
        (MAX_MEMBERS + 1, (1.0,) * (MAX_MEMBERS + 1), "9 adapters: .* at most 8"),
        (2, (1.0, 2.5), "weight of acme/b@1 is 2.5: want -2 to 2"),
        (1, (float("nan"),), "weight of acme/a@1 is nan"),
    ],
)
def test_compositions_out_of_bounds_are_refused(count, weights, named):
    refs = tuple(AdapterRef("acme", "abcdefghi"[i], 1, f"{i:064}") for i in range(count))
    with pytest.raises(InvalidRequest, match=named):
        Composition(refs, weights)


def test_two_adapters_with_the_same_digest_are_refused():
    refs = tuple(AdapterRef("acme", name, 1, "0" * 64) for name in "ab")
    with pytest.raises(InvalidRequest, match="acme/a@1 and acme/b@1 have the same weights"):
        Composition(refs, (1.0, 1.0))
