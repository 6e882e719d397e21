"""The host arena's memory on a machine with a GPU: pinned, of the size asked for, given back."""

import pytest
import torch

from lorikeet_engine.residency.host_arena import HostArena

pytestmark = pytest.mark.gpu


def test_the_arena_is_pinned_and_not_by_torchs_allocator_which_rounds_up():
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    arena = HostArena(3 << 20, torch.bfloat16, pin=True)._arena
    assert arena.is_pinned()
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
    arena.copy_(torch.arange(arena.numel()) % 251)
    assert torch.equal(arena.to("cuda", non_blocking=True).cpu(), arena)


def test_a_second_arena_can_be_pinned_where_the_first_was():
    for _ in range(3):
        assert HostArena(64 << 20, torch.bfloat16, pin=True)._arena.is_pinned()


def test_an_engine_without_adapters_pins_nothing():
    assert HostArena(0, torch.bfloat16, pin=True).elements == 0
