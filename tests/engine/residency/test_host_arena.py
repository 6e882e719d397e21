"""The host arena: evicts the least recently held image; its memory is page-locked by CUDA."""

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
    """An arena full of small images, named by numbers, without holders."""
    arena = HostArena(count * SMALL * 4, torch.float32, pin=False)
    for number in range(count):
        assert arena.reserve(str(number), image_of(SMALL), for_request=True) is not None
        arena.commit(str(number), ())
        arena.release(str(number))
    return arena


def test_the_least_recently_held_images_are_evicted_until_a_hole_fits() -> None:
    arena = filled(10)
    for used in ("2", "4"):  # the image between them is evicted first
        arena.hold(used)
        arena.release(used)
    assert arena.reserve("large", image_of(3 * SMALL), for_request=False) is not None
    assert arena.digests() == ["8", "9", "2", "4", "large"]


def test_held_and_pinned_images_stay_even_if_nothing_can_be_reserved_then() -> None:
    arena = filled(6)
    arena.hold("1")
    assert arena.pin("4")
    assert arena.reserve("large", image_of(3 * SMALL), for_request=False) is None
    assert arena.holds("1")
    assert arena.holds("4")
    arena.release("1")
    assert arena.reserve("large", image_of(4 * SMALL), for_request=True) is not None


def test_a_discarded_image_gives_up_its_reservation_even_while_it_is_held() -> None:
    arena = filled(3)  # memory for one image is never reserved for pins
    arena.hold("0")
    assert arena.pin("0")
    assert arena.pin("1")
    assert not arena.pin("2")
    arena.discard("0")
    assert arena.pin("2")


def test_the_cost_of_eviction_per_image_does_not_grow_with_their_number() -> None:
    took_s = []
    for count in (500, 8000):
        arena = filled(count)
        began_s = time.thread_time()
        assert arena.reserve("large", image_of(count * SMALL), for_request=False) is not None
        took_s.append((time.thread_time() - began_s) / count)
    assert took_s[1] < 4 * took_s[0]


@pytest.mark.gpu
def test_the_arena_is_page_locked_without_torchs_allocator_which_rounds_up():
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    arena = HostArena(3 << 20, torch.bfloat16, pin=True)._arena
    assert arena.is_pinned()
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
    arena.copy_(torch.arange(arena.numel()) % 251)
    assert torch.equal(arena.to("cuda", non_blocking=True).cpu(), arena)


@pytest.mark.gpu
def test_the_memory_of_a_freed_arena_can_be_page_locked_again():
    for _ in range(3):
        assert HostArena(64 << 20, torch.bfloat16, pin=True)._arena.is_pinned()


@pytest.mark.gpu
def test_an_arena_of_no_bytes_page_locks_nothing():
    assert HostArena(0, torch.bfloat16, pin=True).elements == 0
