"""LoRA's second product in Triton: B·v, from rank to hidden width."""

import torch
import triton
import triton.language as tl

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.lora import composition
from lorikeet_engine.kernels.lora.composition import members_at, ranks_at
from lorikeet_engine.kernels.lora.shrink import MAX_PARTS
from lorikeet_engine.kernels.lora.tiles import Tiles, launches_early, tile_at
from lorikeet_engine.kernels.lora.tuning import Regime
from lorikeet_engine.kernels.lora.types import UnexpandedDelta, check_rows

PARTS_AT_ONCE = 4  # of v, whose loads are issued before the first is used


def expand(shrunk: UnexpandedDelta, delta: torch.Tensor, *, add: bool = False) -> None:
    """Compute delta[t, columns of s] = B(t, s)·Σ_p v[t, p, s], for the adapter of each token t.

    A slice s is one of the fused linears of the group, such as q in qkv; p is a part of d_in.

    shrunk: its v [tokens, parts, slices, tiles.rank_stride] float32 is the output of `shrink`; if
      it has vectors, an adapter's gain and bias of outputs, `add` must be true, and each sum s
      becomes (1 + gain) · s + bias
    B(t, s) [d_out, rank], with LoRA's scaling inside
    delta [tokens, sum(d_outs)]: written in place, for tokens with an adapter only; zeros in slices
      where the adapter has rank 0
    add: whether to add to delta, which then holds a product, instead of overwriting it

    Sums are float32, rounded once; if adapters have more than FEW_TOKENS tokens on average (outside
    Regime.FEW), v is rounded to the adapter's dtype first. Raises ShapeError if an operand's shape
    or layout does not fit.
    """
    v, weights, tiles, group = shrunk.v, shrunk.weights, shrunk.tiles, shrunk.group
    check_rows("delta", delta, sum(group.d_outs), weights)
    if len(delta) != len(v):
        raise ShapeError(f"delta has {len(delta)} rows, v {len(v)}: want as many")
    if v.numel() == 0 or len(tiles) == 0:
        return
    assert add or not shrunk.has_vectors, "vectors scale a product"
    config, stride = tiles.config.expand, tiles.rank_stride
    # with vectors, the launch before this one on the stream is the product's, not shrink's
    early = launches_early(tiles, v.device) and not shrunk.has_vectors
    few = tiles.regime == Regime.FEW
    span = config.columns * (1 if few else config.blocks)
    grid = (sum(triton.cdiv(width, span) for width in group.d_outs), len(tiles))
    ranks = 16 if few else tiles.ranks_at_once
    (_expand_few if few else _expand)[grid](
        v, delta, weights.arena, weights.table, tiles.rows,
        shrunk.layer, weights.table.stride(0), weights.table.stride(1), delta.stride(0), stride,
        group.linears[0], v.shape[1],
        *shrunk.vector_operands(),
        *composition.operands(weights, tiles),
        widths=group.d_outs,
        add=add,
        after_shrink=early,
        block_parts=MAX_PARTS if few else PARTS_AT_ONCE,
        block_rank=ranks,
        more_ranks=stride > ranks,
        block_out=config.columns,
        num_warps=config.warps,
        **({} if few else _dense_shapes(tiles, v)),
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _dense_shapes(tiles: Tiles, v: torch.Tensor) -> dict[str, int]:
    return {
        "block_tokens": tiles.config.tokens,
        "blocks": tiles.config.expand.blocks,
        # Without a GPU this is Triton's interpreter, which multiplies the raw bits of bfloat16.
        "upcast": v.device.type == "cpu",
    }


@triton.jit  # type: ignore[untyped-decorator]
def _find_slice(block: tl.tensor, widths: tl.constexpr, span: tl.constexpr) -> tl.tuple:
    """Find the slice of a fused linear, such as q in qkv, to which a block of columns belongs.

    Returns (index of the slice, first column of the slice in delta, width of the slice, first
    column of the block within the slice).

    block: index of the block.
    widths: outputs of each slice.
    span: columns of a block.
    """
    index = 0
    start = 0
    width = 0
    offset = 0
    next_block = 0
    next_start = 0
    for candidate in tl.static_range(len(widths)):
        reached = block >= next_block
        index = tl.where(reached, candidate, index)
        start = tl.where(reached, next_start, start)
        width = tl.where(reached, widths[candidate], width)
        offset = tl.where(reached, (block - next_block) * span, offset)
        next_block += (widths[candidate] + span - 1) // span
        next_start += widths[candidate]
    return index, start, width, offset


@triton.jit(do_not_specialize=["layer", "first_linear", "parts"])  # type: ignore[untyped-decorator]
def _expand_few(
    v: tl.tensor,
    delta: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    delta_stride: tl.tensor,
    rank_stride: tl.tensor,
    first_linear: tl.tensor,
    parts: tl.tensor,
    vectors: tl.tensor,
    vectors_of_slot: tl.tensor,
    vectors_of_layer: tl.tensor,
    members: tl.tensor,
    member_weights: tl.tensor,
    widths: tl.constexpr,
    add: tl.constexpr,
    after_shrink: tl.constexpr,
    block_parts: tl.constexpr,
    block_rank: tl.constexpr,
    more_ranks: tl.constexpr,
    block_out: tl.constexpr,
) -> None:
    """Compute LoRA's delta for one or two tokens and a block of columns of one slice.

    v, delta: A·x, and result. widths: the group's d_outs. add: whether to add to delta.
    arena, table: the adapters' weights, and where each begins (LoraWeights).
    tiles: slot and tokens of each tile (Tiles.rows).
    parts: number of parts of v, which are summed first.
    slot_stride, layer_stride: strides of the table.
    rank_stride: columns of v for each linear.
    first_linear: index of the group's first linear in the table.
    vectors: where each linear's gain and bias begin in the arena; None: not to be applied.
    vectors_of_slot, vectors_of_layer: strides.
    members, member_weights: adapters of each composition (a weighted sum of adapters), and their
        weights; None: a step without compositions.
    after_shrink: whether the kernel is launched before `shrink` ends, and waits for it.
    block_parts, block_rank, block_out: parts, ranks and columns computed at once.
    more_ranks: whether adapters may have more than block_rank ranks.
    """
    slot, start, length = tile_at(tiles, tl.program_id(1))
    if (length == 0) | (slot < 0):
        return
    index, begin, width, offset = _find_slice(tl.program_id(0), widths, block_out)
    linear = layer * layer_stride + (first_linear + index) * 3
    entry = table + slot * slot_stride + linear
    k = tl.arange(0, block_rank)
    if members is not None:
        found, rank = members_at(table, members, member_weights, slot, slot_stride, linear, True, 1)
    else:
        rank = tl.load(entry + 2).to(tl.int32)
    if vectors is not None:
        own = vectors + slot * vectors_of_slot + layer * vectors_of_layer + first_linear + index
        gains = tl.load(own)
        if (rank == 0) & (gains < 0):
            return
    elif add and rank == 0:
        return
    column = offset + tl.arange(0, block_out)
    inside = column < width
    if members is not None:
        b_tile = arena + ranks_at(found, k, width)[0][:, None] + column[None, :]
    else:
        b_start = tl.multiple_of(tl.load(entry + 1), 16)
        b_tile = arena + b_start + k[:, None] * width + column[None, :]
    b = tl.load(b_tile, mask=(k < rank)[:, None] & inside[None, :], other=0.0)
    if after_shrink:
        tl.extra.cuda.gdc_wait()

    part_stride = len(widths) * rank_stride
    token_stride = parts * part_stride
    v_row = v + start.to(tl.int64) * token_stride + index * rank_stride
    second = tl.where(length > 1, rank, 0)  # 0: there is one token
    first_total, second_total = _two_products(
        v_row, b, k, rank, second, token_stride, part_stride, parts, block_parts
    )
    if more_ranks:
        for done in range(block_rank, rank, block_rank):
            left = rank - done
            if members is not None:
                begins = ranks_at(found, done + k, width)[0]
                next_tile = arena + begins[:, None] + column[None, :]
            else:
                next_tile = b_tile + done * width
            b = tl.load(next_tile, mask=(k < left)[:, None] & inside[None, :], other=0.0)
            more, second_more = _two_products(
                v_row + done, b, k, left, second - done, token_stride, part_stride, parts,
                block_parts,
            )  # fmt: skip
            first_total += more
            second_total += second_more
    out = delta + start.to(tl.int64) * delta_stride + begin + column
    there = column < tl.where(length > 1, width, 0)
    if add:
        first_total += tl.load(out, mask=inside, other=0.0).to(tl.float32)
        second_total += tl.load(out + delta_stride, mask=there, other=0.0).to(tl.float32)
    if vectors is not None:
        gain, bias = vectors_at(arena, gains, width, column, inside)
        first_total += gain * first_total + bias
        second_total += gain * second_total + bias
    tl.store(out, first_total.to(delta.dtype.element_ty), mask=inside)
    tl.store(out + delta_stride, second_total.to(delta.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def vectors_at(
    arena: tl.tensor, begin: tl.tensor, width: tl.tensor, column: tl.tensor, inside: tl.tensor
) -> tl.tuple:
    """Load some elements of a linear's gain and bias → two vectors [columns] float32.

    Both are 0 for a linear without vectors.

    begin: element of the arena at which the vectors begin; negative: the linear has none.
    width: outputs of the linear. column: indices of the outputs. inside: mask of those that exist.
    """
    inside = inside & (column < tl.where(begin >= 0, width, 0))
    gains = arena + tl.multiple_of(tl.maximum(begin, 0), 16) + column
    gain = tl.load(gains, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(gains + width, mask=inside, other=0.0).to(tl.float32)
    return gain, bias


@triton.jit  # type: ignore[untyped-decorator]
def _two_products(
    v_row: tl.tensor,
    b: tl.tensor,
    k: tl.tensor,
    ranks: tl.tensor,
    second_ranks: tl.tensor,
    token_stride: tl.tensor,
    part_stride: tl.tensor,
    parts: tl.tensor,
    block_parts: tl.constexpr,
) -> tl.tuple:
    """Multiply v of two tokens by b [ranks, columns] → two results [columns] float32.

    v_row: pointer to v of the first token; the second token's v follows after token_stride.
    k: indices of the ranks in b.
    ranks, second_ranks: number of ranks in b that count for the first and for the second token; 0
        if there is no second token.
    parts: number of parts of v that `shrink` wrote, which are summed first; part_stride elements
        lie from one to the next.
    """
    part = tl.arange(0, block_parts)
    v_tile = v_row + part[:, None] * part_stride + k[None, :]
    there = (part < parts)[:, None]
    first = tl.sum(tl.load(v_tile, mask=there & (k < ranks)[None, :], other=0.0), 0)
    v_tile += token_stride
    second = tl.sum(tl.load(v_tile, mask=there & (k < second_ranks)[None, :], other=0.0), 0)
    wide = b.to(tl.float32)
    return tl.reduce((wide * first[:, None], wide * second[:, None]), 0, _add_both)


@triton.jit  # type: ignore[untyped-decorator]
def _add_both(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tuple:
    return a + c, b + d


@triton.jit(do_not_specialize=["layer", "first_linear", "parts"])  # type: ignore[untyped-decorator]
def _expand(
    v: tl.tensor,
    delta: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    delta_stride: tl.tensor,
    rank_stride: tl.tensor,
    first_linear: tl.tensor,
    parts: tl.tensor,
    vectors: tl.tensor,
    vectors_of_slot: tl.tensor,
    vectors_of_layer: tl.tensor,
    members: tl.tensor,
    member_weights: tl.tensor,
    widths: tl.constexpr,
    add: tl.constexpr,
    after_shrink: tl.constexpr,
    block_parts: tl.constexpr,
    block_rank: tl.constexpr,
    more_ranks: tl.constexpr,
    block_out: tl.constexpr,
    block_tokens: tl.constexpr,
    blocks: tl.constexpr,
    upcast: tl.constexpr,
) -> None:
    """Compute LoRA's delta for a tile of tokens and some blocks of columns of one slice.

    v, delta: A·x, and result. widths: the group's d_outs. add: whether to add to delta.
    arena, table: the adapters' weights, and where each begins (LoraWeights).
    tiles: slot and tokens of each tile (Tiles.rows).
    parts: number of parts of v, which are summed first.
    slot_stride, layer_stride: strides of the table.
    rank_stride: columns of v for each linear.
    first_linear: index of the group's first linear in the table.
    vectors: where each linear's gain and bias begin in the arena; None: not to be applied.
    vectors_of_slot, vectors_of_layer: strides.
    members, member_weights: adapters of each composition (a weighted sum of adapters), and their
        weights; None: a step without compositions.
    after_shrink: whether the kernel is launched before `shrink` ends, and waits for it.
    block_tokens: tokens of a tile.
    block_parts, block_rank, block_out: parts, ranks and columns computed at once.
    more_ranks: whether adapters may have more than block_rank ranks.
    blocks: blocks of columns that the program computes one after the other.
    upcast: whether to multiply in float32, as Triton's interpreter must.
    """
    slot, start, length = tile_at(tiles, tl.program_id(1))
    if (length == 0) | (slot < 0):
        return
    index, begin, width, offset = _find_slice(tl.program_id(0), widths, block_out * blocks)
    linear = layer * layer_stride + (first_linear + index) * 3
    entry = table + slot * slot_stride + linear
    token, k = tl.arange(0, block_tokens), tl.arange(0, block_rank)
    if members is not None:
        found, rank = members_at(table, members, member_weights, slot, slot_stride, linear, True, 1)
    else:
        found = None
        rank = tl.load(entry + 2).to(tl.int32)
    if vectors is not None:
        own = vectors + slot * vectors_of_slot + layer * vectors_of_layer + first_linear + index
        gains = tl.load(own)
        if (rank == 0) & (gains < 0):
            return
    elif add and rank == 0:
        return
    if members is not None:
        begins = ranks_at(found, k, width)[0]
    else:
        b_start = tl.multiple_of(tl.load(entry + 1), 16)
    row, real = (start + token).to(tl.int64), token < length
    part_stride = len(widths) * rank_stride
    v_tile = v + row[:, None] * (parts * part_stride) + index * rank_stride + k[None, :]
    if after_shrink:
        tl.extra.cuda.gdc_wait()

    first_ranks = sum_parts(v_tile, real, k, rank, parts, part_stride, block_parts)
    for block in tl.range(blocks, num_stages=2):
        column = offset + block * block_out + tl.arange(0, block_out)
        inside = column < width
        if members is not None:
            b_tile = arena + begins[:, None] + column[None, :]
        else:
            b_tile = arena + b_start + k[:, None] * width + column[None, :]
        total = multiply(
            first_ranks, v_tile, b_tile, real, inside, k, rank, width, arena, found, column,
            parts, part_stride, block_parts, block_rank, more_ranks, upcast,
        )  # fmt: skip
        out = delta + row[:, None] * delta_stride + begin + column[None, :]
        kept = real[:, None] & inside[None, :]
        if add:
            total += tl.load(out, mask=kept, other=0.0).to(tl.float32)
        if vectors is not None:
            gain, bias = vectors_at(arena, gains, width, column, inside)
            total += gain[None, :] * total + bias[None, :]
        tl.store(out, total.to(delta.dtype.element_ty), mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def multiply(
    first_ranks: tl.tensor,
    v_tile: tl.tensor,
    b_tile: tl.tensor,
    real: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    rank: tl.tensor,
    width: tl.tensor,
    arena: tl.tensor,
    found: tl.tuple,
    column: tl.tensor,
    parts: tl.tensor,
    part_stride: tl.tensor,
    block_parts: tl.constexpr,
    block_rank: tl.constexpr,
    more_ranks: tl.constexpr,
    upcast: tl.constexpr,
) -> tl.tensor:
    """Multiply v by B → [tokens, columns] float32.

    first_ranks: the first block of ranks of v, already summed over the parts that `shrink` wrote.
    v_tile, b_tile: pointers to the first block of ranks of v and of B.
    real, inside: masks of the tokens and of the columns that exist.
    k: indices of the ranks in a block. width: elements from one rank to the next in B.
    found: adapters of a composition, as composition.members_at found them; None: of a step without
        compositions.
    column: indices of the columns.
    part_stride: elements of v from one part to the next.
    block_parts, block_rank: parts and ranks computed at once.
    All other operands: see _expand.
    """
    b = tl.load(b_tile, mask=(k < rank)[:, None] & inside[None, :], other=0.0)
    total = _dot(first_ranks, b, upcast)
    if more_ranks:
        for done in tl.range(block_rank, rank, block_rank, num_stages=1):
            left = rank - done
            if found is not None:
                begins = ranks_at(found, done + k, width)[0]
                next_tile = arena + begins[:, None] + column[None, :]
            else:
                next_tile = b_tile + done * width
            b = tl.load(next_tile, mask=(k < left)[:, None] & inside[None, :], other=0.0)
            ranks = sum_parts(v_tile + done, real, k, left, parts, part_stride, block_parts)
            total += _dot(ranks, b, upcast)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def sum_parts(
    v_tile: tl.tensor,
    real: tl.tensor,
    k: tl.tensor,
    ranks: tl.tensor,
    parts: tl.tensor,
    part_stride: tl.tensor,
    block_parts: tl.constexpr,
) -> tl.tensor:
    """Sum v over the parts that `shrink` wrote → [tokens, ranks].

    v_tile: pointers to v in the first part. part_stride: elements from one part to the next.
    real: mask of the tokens that exist.
    k: indices of the ranks to sum; the result is 0 for indices from `ranks` on.
    parts: number of parts. block_parts: number of parts loaded at once.
    """
    total = tl.zeros((real.shape[0], k.shape[0]), tl.float32)
    for first in range(0, parts, block_parts):
        for other in tl.static_range(block_parts):
            live = k < tl.where(first + other < parts, ranks, 0)
            part = v_tile + (first + other) * part_stride
            total += tl.load(part, mask=real[:, None] & live[None, :], other=0.0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _dot(shrunk: tl.tensor, b: tl.tensor, upcast: tl.constexpr) -> tl.tensor:
    rounded = shrunk.to(b.dtype)
    if upcast:
        return tl.dot(rounded.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(rounded, b, input_precision="ieee")
