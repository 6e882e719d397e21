"""Expand in Triton: rank → hidden, added to the output of every slice in one launch."""

import torch
import triton
import triton.language as tl

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.lora.operands import check_group, check_rows
from lorikeet_engine.kernels.lora.tiles import find_tile, rank_block, tile_bound, tile_tokens
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights, Segments

BLOCK_OUT = 64


def expand(
    v: torch.Tensor,
    y: torch.Tensor,
    weights: LoraWeights,
    segments: Segments,
    layer: int,
    group: LoraGroup,
) -> None:
    """y[t, columns of s] += B(t, s) v[t, s], in place, for the adapter of token t and slice s.

    v [tokens, slices, max_rank] float32, read up to an adapter's own rank; y [tokens, sum(d_outs)].
    Rows outside every segment and slices of rank 0 are not touched. The sum and the addition are
    float32, with v rounded to TF32 if B has 16 bits; y is rounded once. Raises ShapeError.
    """
    check_group(weights, group)
    check_rows("y", y, sum(group.d_outs), weights)
    tokens, slices, max_rank = y.shape[0], len(group.linears), segments.max_rank
    if v.shape != (tokens, slices, max_rank) or not v.is_contiguous():
        raise ShapeError(f"v is {tuple(v.shape)}; want [{tokens}, {slices}, {max_rank}], dense")
    if v.numel() == 0 or len(segments) == 0:
        return
    block_tokens = tile_tokens(tokens, segments)
    column_blocks = sum(triton.cdiv(width, BLOCK_OUT) for width in group.d_outs)
    _expand[(tile_bound(tokens, segments, block_tokens), column_blocks)](
        v, y, weights.arena, weights.table, segments.slots, segments.starts, segments.lengths,
        len(segments), layer, weights.table.stride(0), weights.table.stride(1), y.stride(0),
        max_rank,
        first_linear=group.linears[0],
        widths=group.d_outs,
        # TF32 holds every 16-bit weight exactly.
        precision="ieee" if weights.arena.dtype == torch.float32 else "tf32",
        block_tokens=block_tokens,
        block_segments=triton.next_power_of_2(len(segments)),
        block_rank=rank_block(max_rank),
        block_out=BLOCK_OUT,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _find_slice(block: tl.tensor, widths: tl.constexpr, block_out: tl.constexpr) -> tl.tuple:
    """(slice, its first column in y, its width, the block's first column in the slice)."""
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
        offset = tl.where(reached, (block - next_block) * block_out, offset)
        next_block += (widths[candidate] + block_out - 1) // block_out
        next_start += widths[candidate]
    return index, start, width, offset


@triton.jit(do_not_specialize=["segments", "layer"])  # type: ignore[untyped-decorator]
def _expand(
    v: tl.tensor,
    y: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    segments: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    y_stride: tl.tensor,
    max_rank: tl.tensor,
    first_linear: tl.constexpr,
    widths: tl.constexpr,
    precision: tl.constexpr,
    block_tokens: tl.constexpr,
    block_segments: tl.constexpr,
    block_rank: tl.constexpr,
    block_out: tl.constexpr,
) -> None:
    """One tile of tokens × one block of one slice's columns, over the adapter's true rank."""
    segment, rows, real = find_tile(
        tl.program_id(0), starts, lengths, segments, block_tokens, block_segments
    )
    if segment >= segments:
        return
    index, start, width, offset = _find_slice(tl.program_id(1), widths, block_out)
    slot = tl.load(slots + segment).to(tl.int64)
    entry = table + slot * slot_stride + layer * layer_stride + (first_linear + index) * 3
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return

    columns = offset + tl.arange(0, block_out)
    inside = columns < width
    ranks = tl.arange(0, block_rank)
    v_tile = v + (rows[:, None] * len(widths) + index) * max_rank + ranks[None, :]
    b_tile = arena + tl.load(entry + 1) + columns[None, :].to(tl.int64) * rank + ranks[:, None]
    total = tl.zeros((block_tokens, block_out), tl.float32)
    for first in range(0, rank, block_rank):
        live = first + ranks < rank
        shrunk = tl.load(v_tile + first, mask=real[:, None] & live[None, :], other=0.0)
        b = tl.load(b_tile + first, mask=live[:, None] & inside[None, :], other=0.0)
        total = tl.dot(shrunk, b.to(tl.float32), total, input_precision=precision)

    out = y + rows[:, None] * y_stride + (start + columns)[None, :]
    touched = real[:, None] & inside[None, :]
    total += tl.load(out, mask=touched, other=0.0).to(tl.float32)
    tl.store(out, total.to(y.dtype.element_ty), mask=touched)
