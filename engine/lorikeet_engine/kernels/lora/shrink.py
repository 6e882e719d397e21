"""LoRA's first product in Triton: v = A·x, from hidden width to rank.

One launch computes all parts of a fused linear, such as q, k and v. d_in is split among programs
(split-K), or a decode would have too few programs to keep the memory busy. Each program writes the
sum over its own part of d_in; `expand` adds up these sums, always in the same order.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora import composition
from lorikeet_engine.kernels.lora.composition import members_at, ranks_at
from lorikeet_engine.kernels.lora.tiles import Tiles, launches_early, tile_at
from lorikeet_engine.kernels.lora.types import (
    LoraGroup,
    LoraWeights,
    UnexpandedDelta,
    check_group,
    check_rows,
)

MAX_PARTS = 8


def shrink(
    x: torch.Tensor, weights: LoraWeights, tiles: Tiles, layer: int, group: LoraGroup
) -> UnexpandedDelta:
    """Compute v with Σ_p v[t, p, s, k] = A(t, s)[k] · x[t], for token t's adapter.

    p is a part of d_in, k a rank, and s a slice: one of the fused linears, such as q in qkv. For a
    composition, a weighted sum of adapters, v is multiplied by the weight of the rank's adapter.

    x [tokens, d_in]
    A(t, s) [rank, d_in]
    → v [tokens, parts, slices, tiles.rank_stride] float32, undefined for tokens without an adapter,
      and for k from the adapter's rank on

    Products of 16-bit operands are exact, sums are float32. Raises ShapeError if an operand's shape
    or layout does not fit.
    """
    check_group(weights, group)
    check_rows("x", x, group.d_in, weights)
    config, slices, stride = tiles.config.shrink, len(group.linears), tiles.rank_stride
    columns = min(config.columns, max(16, triton.next_power_of_2(slices * stride)))
    wide = max(columns, min(config.wide_columns, triton.next_power_of_2(stride)))
    one_slice = stride % columns == 0
    blocks = (
        slices * triton.cdiv(stride, wide) if one_slice else triton.cdiv(slices * stride, columns)
    )
    inner = config.block_in * 2 // weights.arena.itemsize
    wanted = triton.next_power_of_2(triton.cdiv(config.programs, max(1, len(tiles) * blocks)))
    split = triton.cdiv(group.d_in, min(MAX_PARTS, wanted) * inner) * inner
    parts = triton.cdiv(group.d_in, split)
    v = x.new_empty((len(x), parts, slices, stride), dtype=torch.float32)
    shrunk = UnexpandedDelta(v, weights, tiles, layer, group)
    if v.numel() == 0 or len(tiles) == 0:
        return shrunk
    _shrink[(parts, blocks, len(tiles))](
        x, weights.arena, weights.table, tiles.rows, v,
        layer, weights.table.stride(0), weights.table.stride(1), x.stride(0), stride,
        group.linears[0], slices, group.d_in, split,
        *composition.operands(weights, tiles),
        # Without a GPU this is Triton's interpreter, which multiplies the raw bits of bfloat16.
        upcast=x.dtype != weights.arena.dtype or x.device.type == "cpu",
        precision="ieee" if torch.float32 in (x.dtype, weights.arena.dtype) else "tf32",
        early_expand=launches_early(tiles, x.device),
        one_slice=one_slice,
        block_tokens=max(16, tiles.config.tokens),
        block_columns=columns,
        wide_columns=wide,
        block_in=inner,
        stages=config.stages,
        num_warps=config.warps,
    )  # fmt: skip
    return shrunk


@triton.jit(do_not_specialize=["layer", "first_linear", "slices"])  # type: ignore[untyped-decorator]
def _shrink(
    x: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    v: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    x_stride: tl.tensor,
    rank_stride: tl.tensor,
    first_linear: tl.tensor,
    slices: tl.tensor,
    d_in: tl.tensor,
    split: tl.tensor,
    members: tl.tensor,
    member_weights: tl.tensor,
    upcast: tl.constexpr,
    precision: tl.constexpr,
    early_expand: tl.constexpr,
    one_slice: tl.constexpr,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
    wide_columns: tl.constexpr,
    block_in: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Compute A·x for one tile of tokens, one block of v's columns and one part of d_in.

    A column of v is a rank of a slice. In a decode a block holds ranks of one slice; programs
    beyond an adapter's rank end at once. In a prefill a block holds all columns of most adapters,
    so that x is read once.

    x [tokens, d_in]. v [tokens, parts, slices, rank_stride] float32: result.
    arena, table: the adapters' weights, and where each begins (LoraWeights).
    tiles: slot and tokens of each tile (Tiles.rows).
    split: inputs of a part.
    slot_stride, layer_stride: strides of the table.
    rank_stride: columns of v for each linear.
    first_linear: index of the group's first linear in the table.
    members, member_weights: adapters of each composition (a weighted sum of adapters), and their
        weights; None: a step without compositions.
    upcast: whether to multiply in float32. early_expand: whether `expand` is launched before this
        kernel ends.
    one_slice: whether a block holds ranks of one slice.
    block_columns: columns of a block.
    block_tokens, block_in: tokens of a tile, and inputs read at once.
    slices: number of linears of the group.
    wide_columns: columns of a block of one slice, for an adapter with more ranks than
        block_columns.
    """
    if early_expand:
        tl.extra.cuda.gdc_launch_dependents()
    slot, start, length = tile_at(tiles, tl.program_id(2))
    if (length == 0) | (slot < 0):
        return
    token = tl.arange(0, block_tokens)
    row, real = (start + token).to(tl.int64), token < length
    begin = tl.program_id(0) * split
    x_tile = x + row[:, None] * x_stride
    v_tile = v + (row[:, None] * tl.num_programs(0) + tl.program_id(0)) * (slices * rank_stride)
    linear = layer * layer_stride + first_linear * 3
    entry = table + slot * slot_stride + linear
    if members is not None:
        if one_slice:
            blocks = tl.cdiv(rank_stride, wide_columns)
            index = tl.program_id(1) // blocks
            k = (tl.program_id(1) - index * blocks) * wide_columns + tl.arange(0, wide_columns)
        else:
            column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
            index, k = column // rank_stride, column % rank_stride
        found, rank = members_at(
            table, members, member_weights, slot, slot_stride, linear + index * 3, index < slices, 0
        )
        begins, weight, live = ranks_at(found, k, d_in)
        if one_slice:
            live = k < rank  # the same, in fewer instructions
        if tl.max(live.to(tl.int32), 0) == 0:
            return
        _shrink_block(
            x_tile, arena + begins, v_tile + (index * rank_stride + k)[None, :], real, live, weight,
            begin, split, d_in, upcast, precision, block_tokens,
            wide_columns if one_slice else block_columns, block_in, stages,
        )  # fmt: skip
    elif one_slice:
        blocks = tl.cdiv(rank_stride, wide_columns)
        index = tl.program_id(1) // blocks
        first = (tl.program_id(1) - index * blocks) * wide_columns
        rank = tl.load(entry + index * 3 + 2).to(tl.int32)
        if first >= rank:
            return
        a = arena + tl.multiple_of(tl.load(entry + index * 3), 16)
        v_tile += index * rank_stride
        if wide_columns == block_columns:  # constant at compile time: one loop instead of two
            _shrink_ranks(
                x_tile, a, v_tile, real, first, rank,
                begin, split, d_in, upcast, precision, block_tokens, wide_columns, block_in,
                stages,
            )  # fmt: skip
        elif rank <= block_columns:
            _shrink_ranks(
                x_tile, a, v_tile, real, first, rank,
                begin, split, d_in, upcast, precision, block_tokens, block_columns, block_in,
                stages,
            )  # fmt: skip
        else:
            _shrink_ranks(
                x_tile, a, v_tile, real, first, rank,
                begin, split, d_in, upcast, precision, block_tokens, wide_columns, block_in,
                stages,
            )  # fmt: skip
    else:
        column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
        index, k = column // rank_stride, column % rank_stride
        known = index < slices
        live = k < tl.load(entry + index * 3 + 2, mask=known, other=0)
        if tl.max(live.to(tl.int32), 0) == 0:
            return
        a = arena + tl.multiple_of(tl.load(entry + index * 3, mask=known, other=0), 16)
        _shrink_block(
            x_tile, a + k.to(tl.int64) * d_in, v_tile + column[None, :], real, live, None,
            begin, split, d_in, upcast, precision, block_tokens, block_columns, block_in, stages,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _shrink_ranks(
    x_tile: tl.tensor,
    a: tl.tensor,
    v_tile: tl.tensor,
    real: tl.tensor,
    first: tl.tensor,
    rank: tl.tensor,
    begin: tl.tensor,
    split: tl.tensor,
    d_in: tl.tensor,
    upcast: tl.constexpr,
    precision: tl.constexpr,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
    block_in: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Compute A·x of a tile of tokens over one part of d_in, for ranks of a slice from `first`.

    x_tile, v_tile: pointers to the tokens' rows in x and v. a: pointer to A. rank: the adapter's.
    real: mask of the tile's tokens that exist. begin, split: first input of the part, and its
        inputs.
    All other operands: see _shrink.
    """
    k = first + tl.arange(0, block_columns)
    _shrink_block(
        x_tile, a + k.to(tl.int64) * d_in, v_tile + k[None, :], real, k < rank, None,
        begin, split, d_in, upcast, precision, block_tokens, block_columns, block_in, stages,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _shrink_block(
    x_tile: tl.tensor,
    a_rows: tl.tensor,
    out: tl.tensor,
    real: tl.tensor,
    live: tl.tensor,
    weight: tl.tensor,
    begin: tl.tensor,
    split: tl.tensor,
    d_in: tl.tensor,
    upcast: tl.constexpr,
    precision: tl.constexpr,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
    block_in: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Multiply a tile of tokens by some rows of A, over one part of d_in, and store the result.

    x_tile: pointers to the tokens' rows in x. a_rows: pointers to the rows of A.
    out: pointers to the results [tokens, rows of A].
    real: mask of the tile's tokens that exist.
    live: mask of the rows of A below the adapter's rank.
    weight: multiplies the result of each row of A; None: 1.
    begin, split: first input of the part, and the number of its inputs.
    All other operands: see _shrink.
    """
    inner = begin + tl.arange(0, block_in)
    x_tile += inner[None, :]
    a_tile = a_rows[None, :] + inner[:, None]
    total = tl.zeros((block_tokens, block_columns), tl.float32)
    for done in tl.range(0, split, block_in, num_stages=stages):
        inside = done + inner < d_in
        hidden = tl.load(x_tile + done, mask=real[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_tile + done, mask=inside[:, None] & live[None, :], other=0.0)
        if upcast:
            hidden = hidden.to(tl.float32)
            a = a.to(tl.float32)
        total = tl.dot(hidden, a, total, input_precision=precision)  # [tokens, columns]
    if weight is not None:
        total *= weight[None, :]
    tl.store(out, total, mask=real[:, None] & live[None, :])
