"""Attention of heads wider than 256 equals torch's; without a GPU in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lorikeet_engine.kernels.attention.by_heads import AttentionByHeads, CapturableByHeads
from lorikeet_engine.kernels.attention.paged_prefill import PagedPrefill, Tiling, cut_tiles
from lorikeet_engine.kernels.attention.protocol import AttentionShape, PageTable, kv_head_dim
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention
from lorikeet_engine.kernels.attention.wide_heads import WideAttention
from lorikeet_engine.kernels.fp8_kv import FP8_KV, KvScales
from tests.engine.interpreter import DEVICES, INTERPRETED
from tests.engine.kernels.test_paged_decode import PAGE, TOLERANCE, dtype_of, step_of

SHAPES = {
    "gemma 4": AttentionShape(16, 2, 512, PAGE, torch.bfloat16, scale=0.1),
    "odd heads": AttentionShape(6, 2, 320, PAGE, torch.bfloat16),
    "one key head": AttentionShape(48, 1, 512, PAGE, torch.bfloat16),
}
# Lengths, and their last tokens, queries. Tiles have 4 tokens in the interpreter.
PROMPTS = ([1, 7, 40, 70], [1, 7, 3, 6])
if not INTERPRETED:
    PROMPTS = ([1, 15, 40, 70, 130], [1, 15, 7, 70, 33])
MIXED = ([18, 17, 130, 5, 70], [1, 9, 1, 5, 1])
LONG = 200 if INTERPRETED else 900


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def compare(shape, step, device, *, scales=None, sinks=None, room=None):
    """Attend to a step's pages, and as torch would.

    room: most decodes that graphs hold; None: nothing is captured.
    """
    lengths, queries = step
    dtype = dtype_of(device)
    shape = replace(shape, dtype=dtype)
    backend = WideAttention(shape, device)
    if room is not None:
        backend.captured(
            room, torch.zeros(len(shape.windows), 4096, dtype=torch.int32, device=device)
        )
    batch = step_of(lengths, queries, shape.windows)
    random = torch.Generator(device).manual_seed(1)
    total = max(int(table.pages.max()) for table in batch.page_tables) + 4
    size = (2, total, PAGE, shape.kv_heads, kv_head_dim(shape.head_dim, "cuda"))
    kv = torch.randn(size, generator=random, device=device)
    kv = kv.to(dtype) if scales is None else (8 * kv).to(FP8_KV)
    kv[..., shape.head_dim :] = 0
    size = (sum(queries), shape.heads + 2 * shape.kv_heads, shape.head_dim)
    q = torch.randn(size, generator=random, device=device).to(dtype)[:, : shape.heads]
    backend.plan(batch)
    torchs = SdpaAttention(shape.soft_cap, shape.scale)
    for group, window in enumerate(shape.windows):
        got = backend.attend(q, kv, batch, scales, window, group, sinks)
        want = torchs.attend(q, kv, batch, scales, window, group, sinks)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("step", [PROMPTS, MIXED, ([LONG, 3], [2, 1])])
def test_prompts_of_any_length_equal_torch(device, name, step):
    compare(SHAPES[name], step, device)


@pytest.mark.parametrize("room", [8, 2])
def test_decodes_beside_prompts_are_computed_apart_if_graphs_hold_them(device, room):
    compare(SHAPES["gemma 4"], MIXED, device, room=room)
    compare(SHAPES["gemma 4"], ([18, 130], [1, 1]), device, room=room)


@pytest.mark.parametrize("windows", [(33, None), (20,), (300, 5), (None, 64, 64)])
def test_tokens_look_back_no_further_than_their_window(device, windows):
    compare(replace(SHAPES["gemma 4"], windows=windows), PROMPTS, device)


def test_scores_are_bent_to_the_soft_cap_and_sinks_take_their_share(device):
    shape = replace(SHAPES["gemma 4"], soft_cap=0.7)
    compare(shape, PROMPTS, device)
    compare(shape, PROMPTS, device, sinks=torch.randn(16, device=device))


def test_fp8_keys_and_values_are_multiplied_by_their_scales(device):
    compare(SHAPES["gemma 4"], MIXED, device, scales=KvScales(0.02, 0.3), room=4)


def test_tiles_that_see_most_come_first_and_cover_each_token_once():
    counts = np.array([5, 1, 17], np.int32)
    table = PageTable(
        np.array([0, 2, 3, 9], np.int32), np.arange(9, dtype=np.int32), np.array([20, 4, 90])
    )
    tiles = cut_tiles(np.array([0, 5, 6], np.int32), counts, table, 8)
    assert [*tiles[:, 3]] == sorted(tiles[:, 3], reverse=True)
    rows = {
        int(row): (int(pages), int(length + row - first))
        for first, count, pages, length in tiles
        for row in range(first, first + count)
    }
    want = [(0, 16 + i) for i in range(5)] + [(2, 4)] + [(3, 74 + i) for i in range(17)]
    assert rows == dict(enumerate(want))


def test_a_gpu_with_less_shared_memory_gets_smaller_tiles():
    assert Tiling.of(232_448) > Tiling.of(166_912) > Tiling.of(101_376) == Tiling.of(0)
    shape = AttentionShape(160, 2, 512, PAGE, torch.bfloat16)  # 80 query heads to a key head
    assert PagedPrefill(shape, torch.device("cpu"))._tokens == 1


class Recorder:
    def __init__(self):
        self.told = []

    def plan(self, batch):
        self.told.append([int(table.pages[0]) for table in batch.page_tables])

    def attend(self, q, layer_kv, batch, scales=None, window=None, group=0, sinks=None):
        self.told.append((window, group, [int(table.pages[0]) for table in batch.page_tables]))
        return q

    def captured(self, tokens, pages):
        self.told.append((tokens, pages.tolist()))
        return self


def test_each_kind_of_heads_gets_the_tables_of_its_groups():
    full, windowed = Recorder(), Recorder()
    both = CapturableByHeads([(range(1), full), (range(1, 3), windowed)])
    batch = step_of([30], [3], (None, 20, 20))
    tables = [int(table.pages[0]) for table in batch.page_tables]
    both.plan(batch)
    both.attend(torch.zeros(1), torch.zeros(1), batch, None, None, 0)
    both.attend(torch.zeros(1), torch.zeros(1), batch, None, 20, 2)
    assert full.told == [tables[:1], (None, 0, tables[:1])]
    assert windowed.told == [tables[1:], (20, 1, tables[1:])]
    captured = both.captured(4, torch.tensor([[1], [2], [3]]))
    assert isinstance(captured, AttentionByHeads)
    assert (full.told[-1], windowed.told[-1]) == ((4, [[1]]), (4, [[2], [3]]))
