"""Shrink in Triton: hidden → rank, for every slice of a fused linear in one launch."""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.operands import check_group, check_rows
from lorikeet_engine.kernels.lora.tiles import find_tile, rank_block, tile_bound, tile_tokens
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights, Segments

BLOCK_IN = 128
# Columns of x that one program sums: a decode has too few tiles to fill a GPU otherwise.
SPLIT_IN = 1024


def shrink(
    x: torch.Tensor, weights: LoraWeights, segments: Segments, layer: int, group: LoraGroup
) -> torch.Tensor:
    """v[t, s] = A(t, s) x[t], for the adapter of token t and slice s of the group.

    x [tokens, d_in] → v [tokens, slices, max_rank] float32; zero for tokens outside every segment
    and beyond an adapter's own rank. Products of 16-bit operands are exact and sums are float32,
    in an order that depends on d_in alone. Raises ShapeError.
    """
    check_group(weights, group)
    check_rows("x", x, group.d_in, weights)
    tokens, slices, max_rank = x.shape[0], len(group.linears), segments.max_rank
    splits = triton.cdiv(group.d_in, SPLIT_IN)
    parts = x.new_zeros((splits, tokens, slices, max_rank), dtype=torch.float32)
    if parts.numel() == 0 or len(segments) == 0:
        return parts[0]
    block_tokens, block_rank = tile_tokens(tokens, segments), rank_block(max_rank)
    rank_blocks = triton.cdiv(max_rank, block_rank)
    grid = (tile_bound(tokens, segments, block_tokens), slices * rank_blocks, splits)
    _shrink[grid](
        x, weights.arena, weights.table, segments.slots, segments.starts, segments.lengths, parts,
        len(segments), layer, weights.table.stride(0), weights.table.stride(1), x.stride(0),
        max_rank, parts.stride(0),
        first_linear=group.linears[0],
        slices=slices,
        d_in=group.d_in,
        # Without a GPU this is Triton's interpreter, which multiplies the raw bits of bfloat16.
        upcast=x.dtype != weights.arena.dtype or x.device.type == "cpu",
        precision="ieee" if torch.float32 in (x.dtype, weights.arena.dtype) else "tf32",
        block_tokens=block_tokens,
        block_segments=triton.next_power_of_2(len(segments)),
        block_rank=block_rank,
        block_in=BLOCK_IN,
        split_in=SPLIT_IN,
    )  # fmt: skip
    return parts.sum(0) if splits > 1 else parts[0]


@triton.jit(do_not_specialize=["segments", "layer"])  # type: ignore[untyped-decorator]
def _shrink(
    x: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    parts: tl.tensor,
    segments: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    x_stride: tl.tensor,
    max_rank: tl.tensor,
    part_stride: tl.tensor,
    first_linear: tl.constexpr,
    slices: tl.constexpr,
    d_in: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
    block_tokens: tl.constexpr,
    block_segments: tl.constexpr,
    block_rank: tl.constexpr,
    block_in: tl.constexpr,
    split_in: tl.constexpr,
) -> None:
    """One tile of tokens × one slice × one block of ranks × one part of d_in."""
    segment, rows, real = find_tile(
        tl.program_id(0), starts, lengths, segments, block_tokens, block_segments
    )
    if segment >= segments:
        return
    index = tl.program_id(1) % slices
    ranks = tl.program_id(1) // slices * block_rank + tl.arange(0, block_rank)
    slot = tl.load(slots + segment).to(tl.int64)
    entry = table + slot * slot_stride + layer * layer_stride + (first_linear + index) * 3
    rank = tl.load(entry + 2)
    if tl.program_id(1) // slices * block_rank >= rank:
        return

    live = ranks < rank
    part = tl.program_id(2)
    columns = part * split_in + tl.arange(0, block_in)
    x_tile = x + rows[:, None] * x_stride + columns[None, :]
    a_tile = arena + tl.load(entry) + ranks[None, :].to(tl.int64) * d_in + columns[:, None]
    total = tl.zeros((block_tokens, block_rank), tl.float32)
    for start in range(0, split_in, block_in):
        inside = start + columns < d_in
        hidden = tl.load(x_tile + start, mask=real[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_tile + start, mask=inside[:, None] & live[None, :], other=0.0)
        if upcast:
            hidden = hidden.to(tl.float32)
            a = a.to(tl.float32)
        total = tl.dot(hidden, a, total, input_precision=precision)  # [tokens, ranks]

    out = (
        parts
        + part.to(tl.int64) * part_stride
        + (rows[:, None] * slices + index) * max_rank
        + ranks[None, :]
    )
    tl.store(out, total, mask=real[:, None] & live[None, :])
