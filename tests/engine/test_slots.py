"""The slot pool: images of different sizes in one arena, found through the table, never torn."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.kernels.lora import LoraWeights
from lorikeet_engine.residency import slots
from lorikeet_engine.residency.blocks import FreeList
from lorikeet_engine.residency.packing import PackedLayout
from lorikeet_engine.residency.slots import SlotPool

TOTAL = 320


def pool_of(elements: int = TOTAL, count: int = 6) -> SlotPool:
    return SlotPool(
        LoraWeights(torch.zeros(elements), torch.zeros(count, 1, 7, 3, dtype=torch.int64))
    )


def layout_of(elements: int) -> PackedLayout:
    """One matrix pair, A in the first half and B in the second."""
    rows = torch.zeros(1, 7, 3, dtype=torch.int64)
    rows[0, 0] = torch.tensor([0, elements // 2, 1])
    return PackedLayout(rows, elements, max_rank=1, cuts=())


def fill(pool: SlotPool, elements: int, seed: int) -> tuple[int, torch.Tensor]:
    slot = pool.place(layout_of(elements))
    image = torch.arange(elements) + 1000.0 * seed
    pool.block(slot).copy_(image)
    return slot, image


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_blocks_never_overlap_and_none_is_lost(steps):
    blocks, taken = FreeList(64), []
    for take, number in steps:
        if take:
            size = number % 20 + 1
            offset = blocks.allocate(size)
            occupied = {at for begin, length in taken for at in range(begin, begin + length)}
            if offset is None:
                free = [at not in occupied for at in range(64)]
                runs = "".join(".x"[not f] for f in free).split("x")
                assert max(map(len, runs)) < size, "a hole was large enough"
            else:
                assert not occupied & set(range(offset, offset + size))
                assert offset + size <= 64
                taken.append((offset, size))
        elif taken:
            blocks.release(*taken.pop(number % len(taken)))
        assert blocks.free == 64 - sum(size for _, size in taken)
    for block in taken:
        blocks.release(*block)
    assert blocks.allocate(64) == 0


def test_a_block_comes_from_the_smallest_hole_that_takes_it():
    blocks = FreeList(100)
    first, kept, second = (blocks.allocate(size) for size in (30, 10, 12))
    blocks.allocate(48)
    blocks.release(first, 30)
    blocks.release(second, 12)
    assert blocks.allocate(11) == second
    assert kept == 30


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=50))
@settings(max_examples=150, deadline=None)
def test_every_image_survives_whatever_is_placed_evicted_and_moved(steps):
    pool, live = pool_of(), {}
    for seed, (place, number) in enumerate(steps):
        size = 16 * (number % 8 + 1)
        if place:
            room = pool.has_room(size)
            used = sum(image.numel() for image in live.values())
            assert room == (len(live) < pool.slots and used + size <= TOTAL)
            if room:
                slot, image = fill(pool, size, seed + 1)
                assert slot not in live
                live[slot] = image
        elif live:
            slot = sorted(live)[number % len(live)]
            del live[slot]
            pool.evict(slot)
        check(pool, live)


def check(pool: SlotPool, live: dict[int, torch.Tensor]) -> None:
    table, arena = pool.weights.table, pool.weights.arena
    assert pool.used_elements == sum(image.numel() for image in live.values())
    spans = []
    for slot in range(pool.slots):
        a_at, b_at, rank = table[slot, 0, 0].tolist()
        if slot not in live:
            assert not table[slot].any(), "a free slot has rank 0"
            continue
        image = live[slot]
        half = image.numel() // 2
        assert rank == 1
        assert b_at == a_at + half
        assert torch.equal(arena[a_at : a_at + image.numel()], image)
        assert torch.equal(pool.block(slot), image)
        spans.append((a_at, a_at + image.numel()))
    spans.sort()
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))


def test_holes_are_closed_when_only_together_they_are_large_enough():
    pool = pool_of()
    placed = [fill(pool, 64, seed) for seed in range(5)]
    for slot, _ in placed[::2]:
        pool.evict(slot)
    kept = dict(placed[1::2])
    slot, image = fill(pool, 192, 9)
    check(pool, kept | {slot: image})


@pytest.mark.parametrize("buffer", [1, 7, 16, 4096])
def test_a_block_that_moves_onto_itself_is_not_torn(buffer, monkeypatch):
    monkeypatch.setattr(slots, "_MOVE_ELEMENTS", buffer)
    pool = pool_of()
    first, _ = fill(pool, 16, 1)
    slot, image = fill(pool, 288, 2)
    pool.evict(first)
    pool.compact()
    check(pool, {slot: image})
    assert pool.weights.table[slot, 0, 0, 0].item() == 0


def test_slots_are_as_limited_as_elements():
    pool = pool_of(count=2)
    fill(pool, 16, 1)
    slot, _ = fill(pool, 16, 2)
    assert not pool.has_room(16)
    pool.evict(slot)
    assert pool.has_room(16)
