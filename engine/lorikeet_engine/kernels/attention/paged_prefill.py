"""Paged attention in Triton for prompts whose heads are too wide for FlashInfer's kernels.

A program computes one *tile*: some neighbouring query tokens of a sequence, for one key head and
the query heads that share it. The rows of its products are all pairs of these tokens and query
heads, so each key is read once for all of them. Programs loop over the keys from the first one that
the tile sees, with a running softmax (FlashAttention 2, Dao 2023).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.attention.paged_decode import Int32s
from lorikeet_engine.kernels.attention.protocol import AttentionShape, PagedSequences, PageTable
from lorikeet_engine.kernels.fp8_kv import KvScales

_FIELDS = 4


class Tiling(NamedTuple):
    """Sizes of a launch.

    rows: rows of a tile, pairs of a query token and a query head.
    block: keys read at once.
    warps, stages: num_warps and num_stages of the Triton kernel. With these sizes, no register is
        spilled for 16-bit pages of heads of 512, on sm_90 and on sm_80.
    """

    rows: int
    block: int
    warps: int
    stages: int

    @classmethod
    def of(cls, shared_bytes: int) -> "Tiling":
        """Choose the sizes for heads of 512 by the shared memory that a program may have."""
        if shared_bytes >= 200_000:  # Hopper and Blackwell's data centre GPUs
            return cls(64, 32, 8, 2)
        if shared_bytes >= 150_000:
            return cls(64, 32, 8, 1)
        return cls(32, 16, 8, 2)


class PagedPrefill:
    """Attention of a step's sequences, each with any number of query tokens, by a Triton kernel."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        shared = 0
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device)
            shared = getattr(gpu, "shared_memory_per_block_optin", 0)
        sharing = shape.heads // shape.kv_heads
        self._tiling = Tiling.of(shared)
        self._rows = max(self._tiling.rows, triton.next_power_of_2(sharing))
        self._tokens = self._rows // sharing  # of a tile
        self._tiles: dict[int | None, torch.Tensor] = {}
        self._pages = torch.empty(0, dtype=torch.int32, device=device)

    def plan(self, batch: PagedSequences, rows: Int32s | None = None) -> None:
        """Cut the query tokens of a batch into tiles, and upload tiles and page numbers.

        rows [sequences]: index in q of each sequence's first query token; None: the sequences'
            query tokens lie side by side in q.
        """
        windows = self._shape.windows
        first = batch.query_starts[:-1] if rows is None else rows
        counts, longest = np.diff(batch.query_starts), 0
        for window in dict.fromkeys(windows):
            table = batch.page_tables[windows.index(window)]
            tiles = cut_tiles(first, counts, table, self._tokens)
            self._tiles[window] = upload(tiles, self._device)
            longest = max(longest, len(table.pages))
        pages = np.zeros((len(windows), longest), np.int32)
        for group, table in enumerate(batch.page_tables):
            pages[group, : len(table.pages)] = table.pages
        self._pages = upload(pages, self._device)

    def attend(
        self,
        q: torch.Tensor,
        layer_kv: torch.Tensor,
        out: torch.Tensor,
        scales: KvScales | None = None,
        window: int | None = None,
        group: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write the attention of all planned query tokens to their rows of `out`.

        out [tokens, heads, width of a value]. scales: factors of the numbers in FP8 pages.
        window: number of tokens that a query attends to, itself included; None: all.
        group: index of the layer's group. sinks [heads]: one more logit of each head's softmax.
        """
        shape, tiles, tiling = self._shape, self._tiles[window], self._tiling
        scale, value_scale = math.log2(math.e) * shape.score_scale, None
        if scales is not None:
            scale, value_scale = scale * scales.key, scales.value
        cap = None
        if shape.soft_cap is not None:  # with tanh(x) = 1 − 2 / (1 + exp(2x))
            scale, cap = scale * 2 / shape.soft_cap, shape.soft_cap * math.log2(math.e)
        _prefill[(len(tiles), shape.kv_heads)](
            q, layer_kv, self._pages[group], tiles, out, scale, cap, value_scale, sinks,
            layer_kv.stride(0), q.stride(0), window,
            kv_heads=shape.kv_heads,
            group=shape.heads // shape.kv_heads,
            rows=self._rows,
            head_dim=shape.value_dim,
            kv_dim=layer_kv.shape[-1] - shape.tail,
            tail=shape.tail,
            page_size=shape.page_size,
            block=tiling.block,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )  # fmt: skip


def cut_tiles(first: Int32s, counts: Int32s, table: PageTable, tokens: int) -> Int32s:
    """Cut query tokens into tiles [tiles, 4] int32, those that see the most keys first.

    A tile's columns: index in q of its first query token; number of its query tokens; start of its
    sequence's pages in table.pages; number of its sequence's tokens up to and including its first
    query token.

    first, counts [sequences]: index in q of each sequence's first query token, and number of its
        query tokens.
    tokens: query tokens of a tile.
    """
    cuts = -(-counts // tokens)
    owner = np.repeat(np.arange(len(counts)), cuts)
    skipped = (np.arange(len(owner)) - (cuts.cumsum() - cuts)[owner]) * tokens
    lengths = (table.kv_lengths - counts)[owner] + skipped + 1
    columns = (
        first[owner] + skipped,
        np.minimum(counts[owner] - skipped, tokens),
        table.starts[:-1][owner],
        lengths,
    )
    tiles = np.stack(columns, axis=1).astype(np.int32)
    return tiles[np.argsort(-lengths, kind="stable")]


@triton.jit  # type: ignore[untyped-decorator]
def _prefill(
    q: tl.tensor,
    layer_kv: tl.tensor,
    pages: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    value_scale: tl.tensor,
    sinks: tl.tensor,
    plane: tl.tensor,
    q_stride: tl.tensor,
    window: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    kv_dim: tl.constexpr,
    tail: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute attention of one tile for one key head and its `group` query heads.

    q, out: queries and results of all tokens. layer_kv: the layer's KV pages.
    sinks [heads]: one more logit of each head's softmax, without a value; None: no sinks.
    pages: KV page numbers of the layer's group.
    tiles: result of cut_tiles.
    scale: factor of the scores. cap: log₂(e) times the soft cap, None without one.
    value_scale: factor of FP8 values; None for other dtypes.
    q_stride: elements of q from token to token.
    plane: number of elements from a key in layer_kv to the value of the same token and head.
    tail: elements of a key after its value, which is its first kv_dim elements in latent attention;
        0: keys and values lie apart.
    rows, block: rows of a tile, and keys read at once (Tiling).
    head_dim: width of a value.
    kv_dim: width of a value in layer_kv, which may be padded.
    window: tokens that a query sees, itself included; None: all.
    """
    fields = tiles + tl.program_id(0) * 4
    head = tl.program_id(1)
    first = tl.load(fields).to(tl.int64)
    count = tl.load(fields + 1)
    first_page = tl.load(fields + 2)
    length = tl.load(fields + 3)
    row = tl.arange(0, rows)
    column = tl.arange(0, kv_dim)
    token = row // group
    query_head = head * group + row % group
    real = (token < count)[:, None]
    if head_dim != kv_dim:
        real = real & (column < head_dim)[None, :]
    inside = query_head[:, None] * head_dim + column[None, :]
    at_q = q + (first + token)[:, None] * q_stride
    if tail:
        at_q += query_head[:, None] * (head_dim + tail)
        end_column = head_dim + tl.arange(0, tail)
        query_ends = tl.load(at_q + end_column[None, :], mask=(token < count)[:, None], other=0.0)
        queries = tl.load(at_q + column[None, :], mask=real, other=0.0)
    else:
        queries = tl.load(at_q + inside, mask=real, other=0.0)
    if value_scale is not None:  # FP8 becomes float16 in a quarter of bfloat16's instructions
        queries = queries.to(tl.float16)
    ends = length + token  # keys before this one are seen
    seen_by_last = length + count - 1
    begin = 0
    if window is not None:
        begin = tl.maximum(length - window, 0) // block * block

    best = tl.full([rows], -1.0e38, tl.float32)  # finite: a row may see no key of a block
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, kv_dim], tl.float32)
    for start in range(begin, seen_by_last, block):
        key = start + tl.arange(0, block)
        held = key < seen_by_last
        page = tl.load(pages + first_page + key // page_size, mask=held, other=0).to(tl.int64)
        at = ((page * page_size + key % page_size) * kv_heads + head) * (kv_dim + tail)
        keys = tl.load(layer_kv + at[None, :] + column[:, None], mask=held[None, :], other=0.0)
        keys = keys.to(queries.dtype)
        score = tl.dot(queries, keys)
        if tail:
            key_ends = tl.load(
                layer_kv + at[None, :] + end_column[:, None], mask=held[None, :], other=0.0
            )
            score = tl.dot(query_ends.to(queries.dtype), key_ends.to(queries.dtype), score)
        score *= scale
        if cap is not None:
            score = cap - 2.0 * cap / (1.0 + tl.exp2(score))
        sees = key[None, :] < ends[:, None]
        if window is not None:
            sees = sees & (key[None, :] >= ends[:, None] - window)
        score = tl.where(sees, score, float("-inf"))
        better = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - better[:, None])
        kept = tl.exp2(best - better)
        if tail:
            values = tl.trans(keys)
        else:
            values = tl.load(
                layer_kv + plane + at[:, None] + column[None, :], mask=held[:, None], other=0.0
            )
            values = values.to(queries.dtype)
        total = total * kept + tl.sum(weight, 1)
        mixed = mixed * kept[:, None] + tl.dot(weight.to(values.dtype), values)
        best = better
    if sinks is not None:
        sink = tl.load(sinks + query_head) * 1.4426950408889634  # log₂(e)
        total += tl.exp2(sink - best)
    mixed = mixed / total[:, None]
    if value_scale is not None:
        mixed *= value_scale
    width: tl.constexpr = kv_heads * group * head_dim
    target = out + (first + token)[:, None] * width + inside
    tl.store(target, mixed.to(out.dtype.element_ty), mask=real)
