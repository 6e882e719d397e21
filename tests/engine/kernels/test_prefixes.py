"""Prefixes of chunks can be attended to in parts; without a GPU, in Triton's interpreter."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lorikeet_engine.kernels.attention.merge import merge
from lorikeet_engine.kernels.attention.prefixes import count_parts, cut_prefixes, starts_of
from lorikeet_engine.kernels.attention.protocol import AttentionShape, PageTable
from tests.engine.interpreter import DEVICES

PAGE = 16
SHAPES = {
    "llama": AttentionShape(8, 2, 128, PAGE, torch.bfloat16),
    "seven to a head": AttentionShape(14, 2, 64, PAGE, torch.bfloat16),
    "one to a head": AttentionShape(2, 2, 64, PAGE, torch.bfloat16),
}


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def step_of(rows, lengths):
    """A step of the last tokens, so many of each, of sequences of these lengths."""
    counts = -(-np.array(lengths) // PAGE)
    pages = np.random.default_rng(3).permutation(counts.sum() + 5)[: counts.sum()]
    table = PageTable(starts_of(counts), pages.astype(np.int32), np.array(lengths, np.int32))
    return SimpleNamespace(query_starts=starts_of(np.array(rows)), page_tables=(table,))


def attend(q, kv, batch, *, causal):
    """(out, lse) written out, in float32. q [tokens, heads, head_dim] of the batch's sequences."""
    table, outs, sums = batch.page_tables[0], [], []
    for i, length in enumerate(table.kv_lengths.tolist()):
        queries = q[batch.query_starts[i] : batch.query_starts[i + 1]]
        pages = torch.from_numpy(table.pages[table.starts[i] : table.starts[i + 1]]).long()
        k, v = kv[:, pages.to(kv.device)].flatten(1, 2)[:, :length]
        sharing = queries.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(sharing, 1), v.repeat_interleave(sharing, 1)
        scores = torch.einsum("qhd,khd->qhk", queries, k) / math.sqrt(queries.shape[-1])
        if causal:
            hidden = torch.ones(len(queries), length, dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(hidden.triu(length - len(queries) + 1)[:, None], -math.inf)
        outs.append(torch.einsum("qhk,khd->qhd", scores.softmax(-1), v))
        sums.append(scores.logsumexp(-1) * math.log2(math.e))
    return torch.cat(outs).contiguous(), torch.cat(sums).contiguous()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([5], [6000]),
        ([7, 20, 3, 12, 1], [7007, 20, 3 + 64, 12 + 15, 6000]),
    ],
    ids=["deep", "several"],
)
def test_merged_parts_equal_the_whole_attention(device, name, rows, lengths):
    shape, batch = SHAPES[name], step_of(rows, lengths)
    random = torch.Generator(device).manual_seed(2)
    pages = int(batch.page_tables[0].pages.max()) + 1
    size = (2, pages, PAGE, shape.kv_heads, shape.head_dim)
    kv = torch.randn(size, generator=random, device=device)
    q = torch.randn(sum(rows), shape.heads, shape.head_dim, generator=random, device=device)
    want, _ = attend(q, kv, batch, causal=True)

    cut = cut_prefixes(batch, shape, programs=200)
    grouped = q.view(sum(rows), shape.kv_heads, -1, shape.head_dim).transpose(1, 2)
    of_parts = grouped[torch.from_numpy(cut.tokens).to(device)].flatten(0, 1)
    own, own_lse = attend(q, kv, cut.own, causal=True)
    parts, lse = attend(of_parts, kv, cut.parts, causal=False)
    merge(own, own_lse, parts, lse, torch.from_numpy(cut.places).to(device), own)
    torch.testing.assert_close(own, want, rtol=0, atol=2e-6)


LLAMA_8B = AttentionShape(32, 8, 128, PAGE, torch.bfloat16)


@pytest.mark.parametrize(("rows", "parts"), [(128, 4), (192, 8), (384, 4), (768, 2)])
def test_a_prefix_of_few_rows_is_cut_into_parts_that_fill_the_gpu(rows, parts):
    cut = cut_prefixes(step_of([rows], [rows + 32_768]), LLAMA_8B, programs=132)
    assert set(np.diff(cut.parts.query_starts)) == {4 * rows}
    keys = cut.parts.page_tables[0].kv_lengths
    assert len(keys) == parts
    assert keys.sum() == 32_768
    assert max(keys) - min(keys) <= PAGE


@pytest.mark.parametrize(
    ("rows", "depth"),
    [(2048, 122_880), (8192, 122_880), (384, 8192), (192, 2000), (192, 15), (192, 0)],
)
def test_nothing_is_cut_where_that_gains_nothing(rows, depth):
    assert cut_prefixes(step_of([rows], [rows + depth]), LLAMA_8B, programs=132) is None


def test_parts_grow_with_the_prefix():
    cuts = [
        cut_prefixes(step_of([192], [192 + depth]), LLAMA_8B, programs=132)
        for depth in (8192, 32_768, 122_880)
    ]
    assert [len(cut.parts.page_tables[0].kv_lengths) for cut in cuts] == [5, 8, 11]


def test_no_part_is_without_a_page_and_no_chunk_pays_for_another():
    batch = step_of([100, 92, 10], [100 + 40_000, 92 + 15, 10 + 40])
    cut = cut_prefixes(batch, LLAMA_8B, programs=132)
    keys = cut.parts.page_tables[0].kv_lengths.tolist()
    assert keys[-2:] == [PAGE, PAGE]
    assert sum(keys[:-2]) == 40_000
    assert cut.own.page_tables[0].kv_lengths.tolist() == [100, 107, 18]
    assert cut.places[100:192, 2].tolist() == [0] * 92


def test_parts_take_little_memory():
    for tiles in range(8, 3000, 8):
        parts = count_parts(np.array([tiles]), np.array([1 << 20]), 132)
        assert parts == 1 or parts * tiles <= 8 * 132
