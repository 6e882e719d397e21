"""Decode attention in Triton equals torch's; without a GPU it runs in Triton's interpreter."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lorikeet_engine.kernels.attention.paged_decode import (
    SHORTEST_ITEM,
    PagedDecode,
    split_rows,
    workspace_bytes,
)
from lorikeet_engine.kernels.attention.protocol import AttentionShape, PageTable, kv_head_dim
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention
from lorikeet_engine.kernels.attention.sinks import add_sinks
from lorikeet_engine.kernels.fp8_kv import FP8_KV, KvScales
from lorikeet_engine.models.batch import Batch
from tests.engine.interpreter import DEVICES, INTERPRETED
from tests.engine.pairs import pairs

PAGE = 16
SHAPES = {
    "llama": AttentionShape(8, 2, 128, PAGE, torch.bfloat16),
    "small heads": AttentionShape(6, 6, 64, PAGE, torch.bfloat16),
    "wide heads": AttentionShape(32, 1, 256, PAGE, torch.bfloat16),
    "odd heads": AttentionShape(4, 2, 96, PAGE, torch.bfloat16),
}
# Lengths of sequences that are cut; passes over the same counters.
LONG, LONGEST, TIMES = (150, 200, 1) if INTERPRETED else (400, 900, 2)
TOLERANCE = 4 * torch.finfo(torch.bfloat16).eps


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def dtype_of(device):
    # Triton's interpreter multiplies the raw bits of bfloat16
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def step_of(lengths, queries, windows):
    """A step of sequences of these lengths, their last tokens queries; pages dealt out of order.

    Layers with windows have only the pages that they see.
    """
    random = torch.Generator().manual_seed(len(lengths))
    lengths, queries = np.array(lengths, np.int32), np.array(queries, np.int32)
    pages = torch.randperm(len(windows) * sum(-(-lengths // PAGE)) + 3, generator=random).int()
    tables, taken = [], 0
    for window in windows:
        unseen = np.zeros_like(lengths)
        if window is not None:
            unseen = np.maximum(lengths - queries + 1 - window, 0) // PAGE
        counts = -(-lengths // PAGE) - unseen
        owned = np.cumsum([0, *counts], dtype=np.int32)
        own = pages[taken : taken + owned[-1]].numpy()
        tables.append(PageTable(owned, own, lengths - unseen * PAGE))
        taken += owned[-1]
    nothing = [torch.zeros(0, dtype=torch.int64)] * 4
    starts = np.cumsum([0, *queries], dtype=np.int32)
    return Batch(*nothing, starts, lengths, tuple(tables), segments=None)


def compare(
    shape, lengths, device, *, queries=None, room=None, times=1, spare=0, scales=None, sinks=None
):
    """Attend over one back end's static buffers, several times, and as torch would.

    In each kind of layer that the shape has. queries: of each sequence; one, where it is not said.
    scales: of FP8 pages. sinks: of each head.
    """
    queries = queries or [1] * len(lengths)
    dtype = dtype_of(device)
    shape = replace(shape, dtype=dtype)
    room = room or sum(queries)
    pages = torch.zeros(len(shape.windows), 4096, dtype=torch.int32, device=device)
    workspace = torch.full((workspace_bytes(shape, room),), 255, dtype=torch.uint8, device=device)
    backend = PagedDecode(shape, room, pages, workspace)
    batch = step_of(lengths, queries, shape.windows)
    total = max(int(table.pages.max()) for table in batch.page_tables) + 4
    random = torch.Generator(device).manual_seed(1)
    size = (2, total, PAGE, shape.kv_heads, kv_head_dim(shape.head_dim, "cuda"))
    kv = torch.randn(size, generator=random, device=device)
    kv = kv.to(dtype) if scales is None else (8 * kv).to(FP8_KV)
    kv[..., shape.head_dim :] = 0
    for table in batch.page_tables:
        for end, length in zip(table.starts[1:], lengths, strict=True):
            if length % PAGE:  # nobody may look behind the end
                kv[:, table.pages[end - 1], length % PAGE :] = torch.nan
    rows = sum(queries)
    for _ in range(times):
        size = (rows + spare, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        qkv = torch.randn(size, generator=random, device=device).to(dtype)
        q = qkv[:, : shape.heads]  # as it lies between the keys and values
        backend.plan(batch)
        for group, window in enumerate(shape.windows):
            got = backend.attend(q, kv, batch, scales, window, group, sinks)[:rows]
            torchs = SdpaAttention(shape.soft_cap)
            want = torchs.attend(q[:rows], kv, batch, scales, window, group, sinks)
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    return got


@pytest.mark.parametrize("name", SHAPES)
def test_sequences_of_any_length_equal_torch(device, name):
    compare(SHAPES[name], [1, 15, 16, 17, 63, 64, 65, 130], device)


def test_a_long_sequence_is_cut_and_put_together_again_every_time(device):
    compare(SHAPES["llama"], [LONGEST, 3, 70], device, times=3)


def test_a_prompts_tokens_see_the_tokens_before_them(device):
    lengths, queries = [18, 17, 130, 5, 70], [18, 1, 5, 5, 2]
    compare(SHAPES["llama"], lengths, device, queries=queries, times=TIMES)


@pytest.mark.parametrize("windows", [(33, None), (64,), (LONG - 10, 1), (None, 64, 64)])
def test_layers_with_windows_look_back_no_further(device, windows):
    shape = replace(SHAPES["llama"], kv_heads=1, windows=windows)
    compare(shape, [32, 34, LONG, 70], device, queries=[1, 1, 1, 5], times=TIMES)


@pytest.mark.parametrize("name", SHAPES)
def test_scores_are_bent_to_the_soft_cap(device, name):
    shape = replace(SHAPES[name], soft_cap=0.7, windows=(40, None))
    compare(shape, [1, 45, 200], device, queries=[1, 3, 1])


def random_sinks(shape, device):
    sinks = 3 * torch.randn(shape.heads, generator=torch.Generator().manual_seed(2))
    sinks[0], sinks[-1] = -200.0, 200.0  # no share and all of it
    return sinks.to(device)


@pytest.mark.parametrize(("name", "soft_cap"), pairs(SHAPES, [None, 0.7]))
def test_sinks_take_their_share_once_however_a_row_is_cut(device, name, soft_cap):
    shape = replace(SHAPES[name], soft_cap=soft_cap, windows=(40, None))
    sinks = random_sinks(shape, device)
    compare(shape, [1, 45, LONG, LONGEST], device, queries=[1, 3, 1, 1], times=TIMES, sinks=sinks)


@pytest.mark.parametrize("name", SHAPES)
def test_sinks_are_added_to_a_result_without_them(device, name):
    shape, dtype, tokens = SHAPES[name], dtype_of(device), 5
    random = torch.Generator().manual_seed(3)
    scores = torch.randn(tokens, shape.heads, 9, generator=random, dtype=torch.float64)
    values = torch.randn(tokens, shape.heads, 9, shape.head_dim, generator=random).double()
    sinks = random_sinks(shape, "cpu")
    lse = (scores.logsumexp(-1) / math.log(2)).float().to(device)
    got = torch.einsum("thk,thkd->thd", scores.softmax(-1), values).to(device, dtype)
    add_sinks(got, lse, sinks.to(device))
    every = torch.cat([scores, sinks.double().view(1, -1, 1).expand(tokens, -1, 1)], dim=-1)
    want = torch.einsum("thk,thkd->thd", every.softmax(-1)[..., :-1], values)
    torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=TOLERANCE)


def test_spare_rows_change_nothing(device):
    compare(SHAPES["llama"], [40, 5], device, room=4, spare=2)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("name", SHAPES)
def test_pages_of_fp8_equal_torch(device, name):
    lengths, queries = [1, 15, 17, 64, 65, 200, 70], [1, 1, 1, 1, 1, 1, 3]
    scales = KvScales(key=0.11, value=0.17)
    compare(SHAPES[name], lengths, device, queries=queries, times=TIMES, scales=scales)


@pytest.mark.gpu
def test_many_sequences_and_one_long_one_say_the_same_every_time():
    lengths = [1 + 7 * i % 300 for i in range(255)] + [20_000]
    runs = [compare(SHAPES["llama"], lengths, torch.device("cuda")) for _ in range(3)]
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
def test_rows_with_a_window_are_as_much_work_as_the_window():
    lengths, pages = np.array([10_000, 5, 129], np.int32), np.array([0, 625, 626], np.int32)
    items = split_rows(pages, lengths, 40, window=100)
    seen = [(row, begin, end) for row, _, begin, end, _, _ in items.tolist() if row >= 0]
    assert seen == [(0, 9900, 9964), (0, 9964, 10_000), (1, 0, 5), (2, 29, 93), (2, 93, 129)]


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
@pytest.mark.parametrize("capacity", [4, 7, 40])
def test_the_pieces_of_a_step_hold_every_token_once_and_fit(capacity):
    lengths = np.array([1000, 1, 64, 130], np.int32)
    pages = np.array([0, 63, 64, 68], np.int32)
    items = split_rows(pages, lengths, capacity)
    assert items.shape == (capacity, 6)
    used = items[items[:, 0] >= 0]
    assert (items[len(used) :] == -1).all()
    for sequence, length in enumerate(lengths):
        mine = used[used[:, 0] == sequence]
        assert mine[0, 2] == 0
        assert mine[-1, 3] == length
        assert (mine[1:, 2] == mine[:-1, 3]).all()
        assert (mine[:, 5] == len(mine)).all()
        assert (mine[:, 4] == np.flatnonzero(used[:, 0] == sequence)[0]).all()
        assert (mine[:, 1] == pages[sequence]).all()
    sizes = used[:, 3] - used[:, 2]
    assert sizes.min() >= 1
    assert sizes.max() <= max(2 * SHORTEST_ITEM, 2 * -(-lengths.sum() // max(1, capacity - 3)))
