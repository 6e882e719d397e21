"""The slot pool: images of different sizes in one arena, found through the table, never torn."""

import itertools
import pickle
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.residency.eviction_score import LeastRecentlyUsed
from lorikeet_engine.residency.free_list import FreeList
from lorikeet_engine.residency.gpu import arena
from lorikeet_engine.residency.gpu.adapters import GpuAdapters
from lorikeet_engine.residency.gpu.arena import ClearRow, Compact, DeviceArena, Move, WriteRow
from lorikeet_engine.residency.gpu.slots import SlotPool
from lorikeet_engine.residency.packed_image import PackedLayout
from tests.engine.residency.tiers_driver import put

TOTAL = 320
LAYERS = 4
LONG = 100_000  # loads


class Pool(SlotPool):
    """A pool, and an arena that runs its commands at once."""

    def __init__(self, elements: int, count: int, layers: int) -> None:
        super().__init__(elements, count)
        self.arena = arena_of(elements, count, layers)
        self.weights = self.arena.weights

    def put(self, layout: PackedLayout) -> int:
        placement = self.place(layout)
        self.arena.run(*placement.commands)
        return placement.slot

    def free(self, slot: int) -> ClearRow:
        command = super().free(slot)
        self.arena.run(command)
        return command

    def blocks(self, slot: int) -> list[torch.Tensor]:
        return self.arena.blocks(self.placed()[slot].pieces)


def arena_of(elements: int, count: int, layers: int) -> DeviceArena:
    table = torch.zeros(count, layers, 7, 3, dtype=torch.int64)
    vectors = torch.full(table.shape[:3], -1)
    return DeviceArena(LoraWeights(torch.zeros(elements), table, vectors), torch.device("cpu"))


def pool_of(elements: int = TOTAL, count: int = 7, layers: int = LAYERS) -> Pool:
    return Pool(elements, count, layers)


def layout_of(*sizes: int) -> PackedLayout:
    """A and B of half a layer's size each; no matrices in a layer of size 0."""
    rows = torch.zeros(len(sizes), 7, 3, dtype=torch.int64)
    begins = (0, *itertools.accumulate(sizes[:-1]))
    for layer, (size, begin) in enumerate(zip(sizes, begins, strict=True)):
        if size:
            rows[layer, 0] = torch.tensor([begin, begin + size // 2, 1])
    return PackedLayout(
        rows,
        sum(sizes),
        max_rank=1,
        ranges=(),
        layers=begins,
        head_rank=0,
        head_rows=0,
        changes_experts=False,
        has_token_rows=False,
    )


def whole(elements: int) -> PackedLayout:
    """All matrices in the first layer, so that the image cannot be split."""
    return layout_of(elements, *[0] * (LAYERS - 1))


def fill(pool: Pool, layout: PackedLayout, seed: int) -> tuple[int, torch.Tensor]:
    slot = pool.put(layout)
    image = torch.arange(layout.elements) + 1000.0 * seed
    blocks = pool.blocks(slot)
    for block, part in zip(blocks, image.split([b.numel() for b in blocks]), strict=True):
        block.copy_(part)
    return slot, image


def image_of(pool: Pool, slot: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Elements that the table finds for a slot, layer by layer, and their offsets."""
    found, spans = [], []
    for a_at, b_at, rank in pool.weights.table[slot, :, 0].tolist():
        if rank:
            spans.append((a_at, b_at + b_at - a_at))  # B is as long as A
            found.append(pool.weights.arena[slice(*spans[-1])])
    return torch.cat(found), spans


def check(pool: Pool, live: dict[int, torch.Tensor]) -> None:
    spans = []
    for slot in range(pool.slots):
        if slot not in live:
            assert not pool.weights.table[slot].any(), "a free slot has rank 0"
            continue
        found, where = image_of(pool, slot)
        assert torch.equal(found, live[slot])
        assert torch.equal(torch.cat(pool.blocks(slot)), live[slot])
        spans += where
    spans.sort()
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
    assert pool.used_elements == sum(image.numel() for image in live.values())


def with_vectors(layout: PackedLayout, layer: int) -> PackedLayout:
    """Let the last 16 elements of a layer be the vectors of its third linear."""
    vectors = torch.full(layout.rows.shape[:2], -1)
    vectors[layer, 2] = [*layout.layers[1:], layout.elements][layer] - 16
    return replace(layout, vectors=vectors)


def test_vectors_are_found_wherever_their_image_is_placed_or_moved():
    pool = pool_of()
    layout = with_vectors(layout_of(32, 64, *[32] * (LAYERS - 2)), layer=1)
    first, _ = fill(pool, whole(64), seed=1)
    slot, image = fill(pool, layout, seed=2)
    want = image[80:96]

    def found() -> torch.Tensor:
        places = pool.weights.vectors
        assert (places[first] == -1).all()
        assert (places[slot] >= 0).sum() == 1
        at = int(places[slot, 1, 2])
        return pool.weights.arena[at : at + 16]

    assert torch.equal(found(), want)
    pool.free(first)
    begin = int(pool.weights.vectors[slot, 1, 2])
    first, _ = fill(pool, whole(pool.elements - layout.elements), seed=3)
    assert int(pool.weights.vectors[slot, 1, 2]) < begin, "the image has moved"
    assert torch.equal(found(), want)


def test_a_slot_forgets_the_vectors_of_an_evicted_image():
    pool = pool_of(count=1)
    slot, _ = fill(pool, with_vectors(layout_of(*[32] * LAYERS), layer=0), seed=1)
    assert (pool.weights.vectors[slot] >= 0).any()
    pool.free(slot)
    assert (pool.weights.vectors == -1).all()
    assert fill(pool, layout_of(*[32] * LAYERS), seed=2)[0] == slot
    assert (pool.weights.vectors == -1).all()


# The free list.


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_blocks_never_overlap_and_none_is_lost(steps):
    blocks, taken = FreeList(64), []
    for take, number in steps:
        if take:
            size = number % 20 + 1
            holes = holes_beside(taken)
            offset = blocks.allocate(size)
            if offset is None:
                assert max(holes, default=0) < size, "a hole was large enough"
            else:
                occupied = {at for begin, length in taken for at in range(begin, begin + length)}
                assert not occupied & set(range(offset, offset + size))
                assert offset + size <= 64
                taken.append((offset, size))
        elif taken:
            blocks.release(*taken.pop(number % len(taken)))
        assert blocks.free == 64 - sum(size for _, size in taken)
        assert blocks.holes() == sorted(holes_beside(taken), reverse=True)
    for block in taken:
        blocks.release(*block)
    assert blocks.allocate(64) == 0


def holes_beside(taken: Sequence[tuple[int, int]], begin: int = 0, end: int = 64) -> list[int]:
    """Sizes of the holes between blocks."""
    line = ["."] * 64
    for offset, size in taken:
        line[offset : offset + size] = "x" * size
    return [len(run) for run in "".join(line[begin:end]).split("x") if run]


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=12), st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_the_cheapest_range_has_enough_free_and_the_fewest_used_elements(layout, size):
    blocks, taken = FreeList(64), []
    for length, kept in layout:
        offset = blocks.allocate(length)
        if offset is not None:
            taken.append((offset, length, kept))
    for offset, length, kept in taken:
        if not kept:
            blocks.release(offset, length)
    kept_blocks = [(offset, length) for offset, length, kept in taken if kept]
    if size > blocks.free:
        return

    def cost(begin: int, end: int) -> int:
        holes = sum(holes_beside(kept_blocks, begin, end))
        return end - begin - holes if holes >= size else 65

    edges = sorted({0, 64} | {e for o, n in kept_blocks for e in (o, o + n)})
    best = min(cost(b, e) for b, e in itertools.combinations(edges, 2))
    range_ = blocks.cheapest_range(size)
    assert cost(*range_) == best
    blocks.compact(*range_)
    assert blocks.holes()[0] >= size
    assert blocks.free == 64 - sum(length for _, length in kept_blocks)


def test_a_block_is_allocated_in_the_smallest_hole_that_fits():
    blocks = FreeList(100)
    first, kept, second = (blocks.allocate(size) for size in (30, 10, 12))
    blocks.allocate(48)
    blocks.release(first, 30)
    blocks.release(second, 12)
    assert blocks.allocate(11) == second
    assert kept == 30


# The pool.


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9999)), max_size=50))
@settings(max_examples=200, deadline=None)
def test_every_image_survives_any_placement_eviction_and_move(steps):
    pool, live = pool_of(), {}
    for seed, (place, number) in enumerate(steps):
        sizes = [16 * (number // 6**layer % 6) for layer in range(LAYERS)]
        if place:
            layout = layout_of(*sizes) if sum(sizes) else whole(16)
            used = sum(image.numel() for image in live.values())
            room = len(live) < pool.slots and used + layout.elements <= TOTAL
            assert pool.can_place(layout.elements) == room
            if room:
                slot, image = fill(pool, layout, seed + 1)
                assert slot not in live
                live[slot] = image
        elif live:
            slot = sorted(live)[number % len(live)]
            del live[slot]
            pool.free(slot)
        check(pool, live)


def test_an_image_is_split_between_layers_before_others_are_moved():
    pool = pool_of()
    placed = [fill(pool, whole(64), seed) for seed in range(5)]
    for slot, _ in placed[::2]:
        pool.free(slot)
    slot, image = fill(pool, layout_of(48, 48, 0, 64), 9)
    check(pool, dict(placed[1::2]) | {slot: image})
    assert len(pool.blocks(slot)) == 3
    assert pool.moved_elements == 0


def test_an_image_lies_in_one_piece_if_a_hole_fits():
    pool = pool_of()
    placed = [fill(pool, whole(size), seed) for seed, size in enumerate((96, 16, 128, 16, 64))]
    for slot, _ in placed[::2]:
        pool.free(slot)
    slot, _ = fill(pool, layout_of(32, 32, 32, 0), 9)
    assert [block.numel() for block in pool.blocks(slot)] == [96]


def test_compaction_moves_least_and_only_if_no_hole_fits_a_layer():
    pool = pool_of()
    sizes = (32, 64, 48, 32, 48, 64, 32)  # every other one will be a hole
    placed = [fill(pool, whole(size), seed) for seed, size in enumerate(sizes)]
    for slot, _ in placed[::2]:
        pool.free(slot)

    placement = pool.place(whole(96))
    close, write = placement.commands
    assert isinstance(close, Compact)
    assert close.moves == (Move(source=144, target=96, elements=32),)
    assert [row.slot for row in close.rows] == [placed[3][0]]
    assert isinstance(write, WriteRow)
    pool.arena.run(close, write)
    pool.free(placement.slot)
    check(pool, dict(placed[1::2]))


def test_the_same_commands_give_the_same_arena():
    """Commands are plain data, so a follower's arena can repeat them."""
    pool, follower = pool_of(count=12), arena_of(TOTAL, 12, LAYERS)
    chance, live, moved = random.Random(3), [], 0

    def tell(*commands):
        pool.arena.run(*commands)
        follower.run(*pickle.loads(pickle.dumps(commands)))

    for number in range(300):
        layout = layout_of(*[16 * chance.randint(0, 2) for _ in range(LAYERS - 1)], 16)
        while not pool.can_place(layout.elements):
            tell(SlotPool.free(pool, live.pop(chance.randrange(len(live)))))
        placement = pool.place(layout)
        tell(*placement.commands)
        moved += len(placement.commands) > 1
        live.append(placement.slot)
        for each in (pool.arena, follower):
            each.copy(torch.full((layout.elements,), float(number)), placement.pieces)
        assert torch.equal(pool.weights.arena, follower.weights.arena)
        assert torch.equal(pool.weights.table, follower.weights.table)
    assert moved > 10


@pytest.mark.parametrize(
    ("leased", "left", "moved"), [("b", "bew", 0), ("bd", "bdw", 64), ("bde", "bdew", 64)]
)
def test_evictable_adapters_are_evicted_before_others_are_moved(leased, left, moved):
    pool, clock = pool_of(), itertools.count()
    adapters = GpuAdapters(pool, pool.arena, LeastRecentlyUsed(), lambda: float(next(clock)))

    def place(name: str, elements: int) -> None:
        ref = AdapterRef("acme", name, 1, name)
        put(adapters, ref, whole(elements))

    for name in "abcde":
        place(name, 64)
    leases = [adapters.lease(name) for name in leased]
    place("w", 128)  # a and c, the least used, leave enough memory but no hole that fits
    assert sorted(resident.ref.name for resident in adapters.snapshot()) == list(left)
    assert pool.moved_elements == moved
    assert all(leases)


@pytest.mark.parametrize(
    ("leased", "sizes", "end", "left"),
    [
        ("ac", (96, 32, 96, 32, 64), 256, "ac"),  # the last moves to two holes that were one
        ("ace", (32, 32, 32, 32, 64), 128, None),  # the last fits neither of two holes
        ("a", (32, 48, 160), 224, "a"),  # the last is too large for the hole of b
        ("", (64, 64, 32), 160, "abc"),
    ],
)
def test_adapters_are_evicted_only_if_the_end_of_the_arena_can_then_be_cut(
    leased, sizes, end, left
):
    pool = pool_of()
    pool.least = 64
    adapters = GpuAdapters(pool, pool.arena, LeastRecentlyUsed(), itertools.count().__next__)
    names = "abcde"[: len(sizes)]
    for name, size in zip(names, sizes, strict=True):
        put(adapters, AdapterRef("acme", name, 1, name), whole(size))
    leases = [adapters.lease(name) for name in leased]
    assert all(leases)
    if pool.used_elements < pool.elements:
        assert adapters.cut(pool.elements - pool.used_elements)
    before = pool.elements
    could = before == end or adapters.cut(before - end)
    assert could == (left is not None)
    assert pool.elements == (end if could else before)
    now = "".join(sorted(resident.ref.name for resident in adapters.snapshot()))
    assert now == (left or names)


def test_images_of_many_sizes_fill_the_arena_without_moves():
    """Random victims; adapters of ranks 4 to 256, a quarter on q and v alone."""

    class Chance:
        def score(self, _use) -> float:
            return chance.random()

    layers, per_rank, chance, used = 8, {True: 2, False: 12}, random.Random(5), []
    pool = pool_of(elements=200_000, count=400, layers=layers)
    adapters = GpuAdapters(pool, pool.arena, Chance(), lambda: 0.0)
    for load in range(600):
        size = chance.choice([4, 8, 16, 32, 64, 128, 256]) * per_rank[chance.random() < 0.25]
        layout = layout_of(*[size] * layers)
        ref = AdapterRef("acme", str(load), 1, str(load))
        put(adapters, ref, layout)
        used.append(pool.used_elements / pool.elements)
    assert pool.moved_elements == 0
    assert sum(used[300:]) / 300 > 0.93


@pytest.mark.parametrize("buffer", [1, 7, 16, 4096])
@pytest.mark.parametrize("gap", [16, 160])
def test_a_block_that_moves_onto_itself_is_not_torn(gap, buffer, monkeypatch):
    monkeypatch.setattr(arena, "_MOVE_ELEMENTS", buffer)
    pool = pool_of()
    first, _ = fill(pool, whole(gap), 1)
    slot, image = fill(pool, whole(TOTAL - gap - 16), 2)
    pool.free(first)
    last, _ = fill(pool, whole(gap + 16), 3)
    pool.free(last)
    check(pool, {slot: image})
    assert pool.weights.table[slot, 0, 0, 0].item() == 0


def test_placement_needs_a_free_slot():
    pool = pool_of(count=2)
    fill(pool, whole(16), 1)
    slot, _ = fill(pool, whole(16), 2)
    assert not pool.can_place(16)
    pool.free(slot)
    assert pool.can_place(16)


@pytest.mark.parametrize("loads", [2000, pytest.param(LONG, marks=pytest.mark.soak)])
def test_no_memory_is_ever_stranded(loads):
    """Random loads of adapters of ranks 4 to 256, a quarter on q and v alone."""
    layers, per_rank, chance, live = 8, {True: 2, False: 12}, random.Random(5), {}
    noise = torch.randint(127, (loads + layers * 256 * 12,), dtype=torch.int8)
    pool = pool_of(elements=300_000, count=200, layers=layers)
    for load in range(loads):
        size = chance.choice([4, 8, 16, 32, 64, 128, 256]) * per_rank[chance.random() < 0.25]
        layout = layout_of(*[size] * layers)
        while pool.used_elements + layout.elements > pool.elements:
            slot = chance.choice(list(live))
            assert torch.equal(image_of(pool, slot)[0], live.pop(slot))
            pool.free(slot)
        slot = pool.put(layout)
        live[slot] = image = noise[load:][: layout.elements]
        blocks = pool.blocks(slot)
        for block, part in zip(blocks, image.split([b.numel() for b in blocks]), strict=True):
            block.copy_(part)
    check(pool, live)


def test_the_end_of_an_arena_is_cut_off_and_its_images_keep_their_contents():
    pool = pool_of(elements=100)
    slots = [pool.put(layout_of(10, 10, 0, 0)) for _ in range(5)]
    for value, slot in enumerate(slots, 1):
        for block in pool.blocks(slot):
            block.fill_(value)
    pool.free(slots[1])
    pool.free(slots[2])
    command = pool.cut(30)
    assert command is not None
    pool.arena.run(command)
    assert (pool.elements, pool.used_elements) == (70, 60)
    for value, slot in ((1, slots[0]), (4, slots[3]), (5, slots[4])):
        blocks = pool.blocks(slot)
        assert all((block == value).all() for block in blocks)
        assert all(p.offset + p.end - p.begin <= 70 for p in pool.image(slot).pieces)
    assert pool.cut(20) is None, "images would not fit"
    assert pool.elements - pool.used_elements == 10
    pool.extend(30)
    assert pool.can_place(40)
    pool.put(layout_of(40, 0, 0, 0))
    assert pool.used_elements == 100
