"""Paged attention in Triton for CUDA graphs of small steps; query tokens are computed one by one.

A *row* is a query token together with the tokens that it attends to: all tokens of its sequence up
to itself, or with a window only the last of these. In a decode each sequence has one row.

A program computes one *item*, a piece of a row's tokens, for one key head and the query heads that
share it. Rows are split into items of similar length, enough to fill the GPU. The programs of a
row's items write partial results. The last of these programs to finish merges them in the order of
the tokens, so the result is always the same (Flash-Decoding, Dao et al. 2023). Items and pages are
read from buffers that a captured graph keeps; each plan refills these buffers.

On an H200, 32 layers of 256 sequences of 276 tokens take 2.4 ms, with FlashInfer's kernel 3.5 ms.
If one of the sequences has 20,000 tokens, they take 2.7 ms, with FlashInfer's kernel 9.7 ms.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.attention.protocol import AttentionShape, PagedSequences, PageTable
from lorikeet_engine.kernels.fp8_kv import KvScales

SHORTEST_ITEM = 64  # tokens
_ITEMS_FOR_ALL_HEADS = 264  # programs beyond one for each row and head: 2 for each of 132 SMs
_FIELDS = 6
Int32s = npt.NDArray[np.int32]


class PagedDecode:
    """AttentionBackend for steps of few query tokens: decodes and short prompts.

    The kernel is captured in CUDA graphs of small steps: `attend` runs while a graph is captured,
    `plan` before every replay.
    """

    def __init__(
        self, shape: AttentionShape, tokens: int, pages: torch.Tensor, workspace: torch.Tensor
    ) -> None:
        """Allocate static buffers, except the two that are passed: `pages` and `workspace`.

        Several back ends may share these two.

        tokens: maximum number of query tokens of a step.
        pages [groups, pages of all sequences of a step] int32: buffer for the KV page numbers of
            each group of layers.
        workspace: workspace_bytes() bytes for partial results.
        """
        self._shape = shape
        self._pages = pages
        self._capacity = _capacity(shape, tokens)
        device = pages.device
        self._items = {
            window: torch.full((self._capacity, _FIELDS), -1, dtype=torch.int32, device=device)
            for window in shape.windows
        }
        rows = self._capacity * shape.heads
        floats = workspace[: workspace_bytes(shape, tokens)].view(torch.float32)
        self._parts, self._scales = (
            floats[: rows * shape.value_dim],
            floats[rows * shape.value_dim :],
        )
        # number of a row's finished items; the last item resets it to 0
        self._done = torch.zeros(tokens, shape.kv_heads, dtype=torch.int32, device=device)
        self._many = tokens * shape.kv_heads >= 1024

    def plan(self, batch: PagedSequences) -> None:
        """Copy the work of a batch to the buffers that graphs read, before its first `attend`."""
        windows, device = self._shape.windows, self._pages.device
        for window, items in self._items.items():
            first, groups = windows.index(window), windows.count(window)
            tables = batch.page_tables[first : first + groups]
            starts, lengths = query_rows(batch.query_starts, tables[0])
            items.copy_(upload(split_rows(starts, lengths, self._capacity, window), device))
            pages = upload(np.stack([table.pages for table in tables]), device)
            self._pages[first : first + groups, : pages.shape[1]].copy_(pages)

    def attend(
        self,
        q: torch.Tensor,
        layer_kv: torch.Tensor,
        _: PagedSequences,
        scales: KvScales | None = None,
        window: int | None = None,
        group: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of the planned batch in one layer: [tokens, heads, width of a value].

        group: index of the layer's group. sinks [heads]: one more logit of each head's softmax.
        """
        shape, sharing = self._shape, self._shape.heads // self._shape.kv_heads
        out = q.new_empty(*q.shape[:2], shape.value_dim)
        scale = math.log2(math.e) * shape.score_scale
        value_scale = None
        if scales is not None:
            scale, value_scale = scale * scales.key, scales.value
        cap = None
        if shape.soft_cap is not None:  # with tanh(x) = 1 − 2 / (1 + exp(2x))
            scale, cap = scale * 2 / shape.soft_cap, shape.soft_cap * math.log2(math.e)
        # With many programs one warp each reads best; with few, each must read more at once.
        block, warps, stages = (32, 1, 4) if self._many else (64, 2, 3)
        if layer_kv.shape[-1] > 256:  # a row's sums fill the registers of four warps
            block, warps, stages = 16, 4, 2
        elif layer_kv.shape[-1] > 128:
            block = 32
        _decode[(shape.kv_heads, self._capacity)](
            q, layer_kv, self._pages[group], self._items[window], self._parts, self._scales,
            self._done, out, scale, cap, value_scale, sinks, layer_kv.stride(0), q.stride(0),
            kv_heads=shape.kv_heads,
            group=sharing,
            rows=max(16, triton.next_power_of_2(sharing)),  # tl.dot wants 16
            head_dim=shape.value_dim,
            kv_dim=layer_kv.shape[-1] - shape.tail,
            tail=shape.tail,
            page_size=shape.page_size,
            block=block,
            num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
        return out


def workspace_bytes(shape: AttentionShape, tokens: int) -> int:
    """Return the bytes that the partial results of a step of `tokens` query tokens need.

    The tokens that a query token attends to are cut into pieces. Each piece has a partial result
    for each query head: a weighted sum of values, float32 [head_dim], and the log2 of the sum of
    exponentials.
    """
    return 4 * _capacity(shape, tokens) * shape.heads * (shape.value_dim + 1)


def query_rows(query_starts: Int32s, table: PageTable) -> tuple[Int32s, Int32s]:
    """Return, for each query token, the start of its sequence's KV pages, and the length of its
    sequence up to that token.

    The start is an index into table.pages. The length counts the query token itself, and also
    earlier tokens that a window would exclude.

    query_starts [sequences + 1]: first query token of each sequence, then the number of all query
        tokens.
    → two arrays [query tokens]
    """
    lengths = table.kv_lengths
    owner = np.repeat(np.arange(len(lengths)), np.diff(query_starts))
    behind = query_starts[owner + 1] - 1 - np.arange(len(owner))
    return table.starts[owner], (lengths[owner] - behind).astype(np.int32)


def split_rows(pages: Int32s, lengths: Int32s, capacity: int, window: int | None = None) -> Int32s:
    """Split the tokens that each query token (a row) attends to into items [capacity, 6] int32.

    An item is a piece of a row's tokens. Its columns: index of the row; start of the row's pages;
    first token of the item; end of its tokens; index of the row's first item; number of the row's
    items. All columns of an unused item are −1.

    pages [rows]: start of each row's pages in PageTable.pages.
    lengths [rows]: number of tokens of the sequence up to and including the row's own.
    capacity: number of items to return, used or not.
    window: number of last tokens that a row attends to; None: all.
    """
    # Items long enough that merging a row's parts takes no longer than computing one: merging one
    # part costs about as much as 16 tokens.
    seen = lengths if window is None else np.minimum(lengths, window)
    length = SHORTEST_ITEM
    while length * length < 8 * seen.max():
        length *= 2
    while (counts := -(-seen // length)).sum() > capacity:
        length *= 2
    first = counts.cumsum() - counts
    owner = np.repeat(np.arange(len(counts)), counts)
    begin = (lengths - seen)[owner] + (np.arange(len(owner)) - first[owner]) * length
    end = np.minimum(begin + length, lengths[owner])
    items = np.full((capacity, _FIELDS), -1, np.int32)
    columns = (owner, pages[owner], begin, end, first[owner], counts[owner])
    items[: len(owner)] = np.stack(columns, axis=1)
    return items


def _capacity(shape: AttentionShape, tokens: int) -> int:
    return tokens + -(-_ITEMS_FOR_ALL_HEADS // shape.kv_heads)


@triton.jit  # type: ignore[untyped-decorator]
def _decode(
    q: tl.tensor,
    layer_kv: tl.tensor,
    pages: tl.tensor,
    items: tl.tensor,
    parts: tl.tensor,
    scales: tl.tensor,
    done: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    value_scale: tl.tensor,
    sinks: tl.tensor,
    plane: tl.tensor,
    q_stride: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    kv_dim: tl.constexpr,
    tail: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute attention for one item (a piece of a query token's keys) and one key head.

    Computes all `group` query heads that share the key head. If the query token has several items,
    the last of their programs to finish merges the results.

    q, layer_kv, out: queries, KV pages and result of PagedDecode.attend.
    pages: KV page numbers of the layer's group. items: result of split_rows.
    parts, scales: partial result of each item, and the log2 of its sum of exponentials.
    done: number of finished items of each query token and key head.
    scale: factor of the scores. cap: log₂(e) times the soft cap, None without one.
    value_scale: factor of FP8 values; None for other dtypes.
    sinks [heads]: a logit more in each head's softmax, without a value; None: no sinks.
    plane: number of elements from a key in layer_kv to the value of the same token and head.
    tail: elements of a key behind its first kv_dim, which are its value then (AttentionShape.tail).
    rows: `group` rounded up to what tl.dot supports. block: number of tokens read at once.
    """
    head = tl.program_id(0)
    item = tl.program_id(1)
    fields = items + item * 6
    query = tl.load(fields)
    if query < 0:
        return
    first_page = tl.load(fields + 1)
    begin = tl.load(fields + 2)
    end = tl.load(fields + 3)
    count = tl.load(fields + 5)
    row = tl.arange(0, rows)
    column = tl.arange(0, kv_dim)
    real = (row < group)[:, None]
    if head_dim != kv_dim:
        real = real & (column < head_dim)[None, :]
    inside = (head * group + row)[:, None] * head_dim + column[None, :]  # of all heads' outputs
    at_q = q + query.to(tl.int64) * q_stride
    if tail:
        at_q += (head * group + row)[:, None] * (head_dim + tail)
        end_column = head_dim + tl.arange(0, tail)
        ends = tl.load(at_q + end_column[None, :], mask=(row < group)[:, None], other=0.0)
        queries = tl.load(at_q + column[None, :], mask=real, other=0.0)
    else:
        queries = tl.load(at_q + inside, mask=real, other=0.0)
    if value_scale is not None:  # FP8 becomes float16 in a quarter of bfloat16's instructions
        queries = queries.to(tl.float16)

    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, kv_dim], tl.float32)
    for start in range(begin, end, block):
        token = start + tl.arange(0, block)
        seen = token < end
        page = tl.load(pages + first_page + token // page_size, mask=seen, other=0).to(tl.int64)
        at = ((page * page_size + token % page_size) * kv_heads + head) * (kv_dim + tail)
        keys = tl.load(layer_kv + at[None, :] + column[:, None], mask=seen[None, :], other=0.0)
        keys = keys.to(queries.dtype)  # of FP8
        score = tl.dot(queries, keys)
        if tail:
            key_ends = tl.load(
                layer_kv + at[None, :] + end_column[:, None], mask=seen[None, :], other=0.0
            )
            score = tl.dot(ends.to(queries.dtype), key_ends.to(queries.dtype), score)
        score *= scale
        if cap is not None:
            score = cap - 2.0 * cap / (1.0 + tl.exp2(score))
        score = tl.where(seen[None, :], score, float("-inf"))
        better = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - better[:, None])
        kept = tl.exp2(best - better)
        if tail:
            values = tl.trans(keys)
        else:
            values = tl.load(
                layer_kv + plane + at[:, None] + column[None, :], mask=seen[:, None], other=0.0
            )
            values = values.to(queries.dtype)
        total = total * kept + tl.sum(weight, 1)
        mixed = mixed * kept[:, None] + tl.dot(weight.to(values.dtype), values)
        best = better
    if sinks is not None:  # counted once for a row: here, or where its parts are merged
        sink = tl.load(sinks + head * group + row, mask=row < group, other=float("-inf"))
        sink *= 1.4426950408889634  # log₂(e)
        total += tl.where(count == 1, tl.exp2(sink - best), 0.0)
    mixed = mixed / total[:, None]
    if value_scale is not None:
        mixed *= value_scale

    width: tl.constexpr = kv_heads * group * head_dim
    target = out + query.to(tl.int64) * width + inside
    if count == 1:
        tl.store(target, mixed.to(out.dtype.element_ty), mask=real)
        return
    tl.store(parts + item * width + inside, mixed, mask=real)
    at_scale = head * group + row
    heads: tl.constexpr = kv_heads * group
    tl.store(scales + item * heads + at_scale, best + tl.log2(total), mask=row < group)
    tl.debug_barrier()  # all of this program's parts are stored before it counts itself done
    if tl.atomic_add(done + query * kv_heads + head, 1) < count - 1:
        return
    first = tl.load(fields + 4)
    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, kv_dim], tl.float32)
    for piece in range(first, first + count):
        # .cg: from the L2 cache, which holds other programs' parts
        theirs = tl.load(
            scales + piece * heads + at_scale,
            mask=row < group,
            other=0.0,
            cache_modifier=".cg",
        )
        part = tl.load(parts + piece * width + inside, mask=real, other=0.0, cache_modifier=".cg")
        better = tl.maximum(best, theirs)
        kept, added = tl.exp2(best - better), tl.exp2(theirs - better)
        mixed = mixed * kept[:, None] + part * added[:, None]
        total = total * kept + added
        best = better
    if sinks is not None:
        total += tl.exp2(sink - best)
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)
    tl.store(done + query * kv_heads + head, 0)
