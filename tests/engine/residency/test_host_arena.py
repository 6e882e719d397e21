"""The host arena: images are evicted least recently held first; its memory is pinned by CUDA."""

import time
from dataclasses import replace

import pytest
import torch

from lorikeet_engine.residency.host_arena import HostArena
from lorikeet_engine.residency.packed_image import PackedLayout
from tests.engine.residency.test_slots import layout_of

SMALL = 64


def image_of(elements: int) -> PackedLayout:
    return replace(layout_of(elements), ranges=((),))  # of one GPU


def filled(count: int) -> HostArena:
    """An arena that is full of small images, by their numbers, of which nobody holds any."""
    arena = HostArena(count * SMALL * 4, torch.float32, pin=False)
    for number in range(count):
        assert arena.reserve(str(number), image_of(SMALL), for_request=True) is not None
        arena.commit(str(number), ())
        arena.release(str(number))
    return arena


def test_the_least_recently_held_go_until_there_is_a_hole_and_no_more() -> None:
    arena = filled(10)
    for used in ("2", "4"):  # between them lies one that goes first
        arena.hold(used)
        arena.release(used)
    assert arena.reserve("large", image_of(3 * SMALL), for_request=False) is not None
    assert arena.digests() == ["8", "9", "2", "4", "large"]


def test_what_is_held_or_pinned_stays_and_where_it_leaves_no_hole_nothing_is_reserved() -> None:
    arena = filled(6)
    arena.hold("1")
    assert arena.pin("4")
    assert arena.reserve("large", image_of(3 * SMALL), for_request=False) is None
    assert arena.holds("1")
    assert arena.holds("4")
    arena.release("1")
    assert arena.reserve("large", image_of(4 * SMALL), for_request=True) is not None


def test_an_image_in_place_of_thousands_costs_each_of_them_as_much_as_one_of_few() -> None:
    took_s = []
    for count in (500, 8000):
        arena = filled(count)
        began_s = time.thread_time()
        assert arena.reserve("large", image_of(count * SMALL), for_request=False) is not None
        took_s.append((time.thread_time() - began_s) / count)
    assert took_s[1] < 4 * took_s[0]


@pytest.mark.gpu
def test_the_arena_is_pinned_and_not_by_torchs_allocator_which_rounds_up():
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    arena = HostArena(3 << 20, torch.bfloat16, pin=True)._arena
    assert arena.is_pinned()
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
    arena.copy_(torch.arange(arena.numel()) % 251)
    assert torch.equal(arena.to("cuda", non_blocking=True).cpu(), arena)


@pytest.mark.gpu
def test_a_second_arena_can_be_pinned_where_the_first_was():
    for _ in range(3):
        assert HostArena(64 << 20, torch.bfloat16, pin=True)._arena.is_pinned()


@pytest.mark.gpu
def test_an_engine_without_adapters_pins_nothing():
    assert HostArena(0, torch.bfloat16, pin=True).elements == 0
