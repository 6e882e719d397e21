"""Shrink in Triton: hidden → rank, for every slice of a fused linear in one launch.

d_in is split among programs, or a decode would have too few of them to keep the memory busy. Each
writes the sum of its own part, and expand adds the parts when it reads them: nothing is zeroed
before, no launch stands between, and the order of the sums is always the same.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.operands import check_group, check_rows, launches_early
from lorikeet_engine.kernels.lora.tiles import Tiles, tile_at
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights

MOST_PARTS = 8


def shrink(
    x: torch.Tensor, weights: LoraWeights, tiles: Tiles, layer: int, group: LoraGroup
) -> torch.Tensor:
    """v[t, :, s, k] sums to A(t, s)[k] · x[t], for the adapter of token t and slice s of the group.

    x [tokens, d_in] → v [tokens, parts, slices, tiles.rank_stride] float32; undefined for tokens
    without an adapter, and from an adapter's own rank on. Products of 16-bit operands are exact,
    sums are float32. Raises ShapeError.
    """
    check_group(weights, group)
    check_rows("x", x, group.d_in, weights)
    cut, slices, stride = tiles.cut.shrink, len(group.linears), tiles.rank_stride
    columns = min(cut.columns, max(16, triton.next_power_of_2(slices * stride)))
    blocks = triton.cdiv(slices * stride, columns)
    inner = cut.inner * 2 // weights.arena.itemsize
    wanted = triton.next_power_of_2(triton.cdiv(cut.programs, max(1, len(tiles) * blocks)))
    split = triton.cdiv(group.d_in, min(MOST_PARTS, wanted) * inner) * inner
    parts = triton.cdiv(group.d_in, split)
    v = x.new_empty((len(x), parts, slices, stride), dtype=torch.float32)
    if v.numel() == 0 or len(tiles) == 0:
        return v
    _shrink[(parts, blocks, len(tiles))](
        x, weights.arena, weights.table, tiles.rows, v,
        layer, weights.table.stride(0), weights.table.stride(1), x.stride(0), stride,
        group.linears[0], slices, group.d_in, split,
        # Without a GPU this is Triton's interpreter, which multiplies the raw bits of bfloat16.
        upcast=x.dtype != weights.arena.dtype or x.device.type == "cpu",
        precision="ieee" if torch.float32 in (x.dtype, weights.arena.dtype) else "tf32",
        early_expand=launches_early(x.device),
        block_tokens=max(16, tiles.cut.tokens),
        block_columns=columns,
        block_in=inner,
        stages=cut.stages,
        num_warps=cut.warps,
    )  # fmt: skip
    return v


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
    upcast: tl.constexpr,
    precision: tl.constexpr,
    early_expand: tl.constexpr,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
    block_in: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """One tile of tokens × one block of v's columns × one part of d_in.

    A column is a rank of a slice. In a decode a block holds 16 ranks of one slice, and programs
    beyond an adapter's rank end at once; in a prefill it holds all columns of most adapters, so
    that x is read once.
    """
    if early_expand:
        tl.extra.cuda.gdc_launch_dependents()
    slot, start, length = tile_at(tiles, tl.program_id(2))
    if length == 0:
        return
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    index, k = column // rank_stride, column % rank_stride
    entry = table + slot * slot_stride + layer * layer_stride + (first_linear + index) * 3
    live = k < tl.load(entry + 2, mask=index < slices, other=0)
    if tl.max(live.to(tl.int32), 0) == 0:
        return

    token = tl.arange(0, block_tokens)
    row, real = (start + token).to(tl.int64), token < length
    part = tl.program_id(0)
    inner = part * split + tl.arange(0, block_in)
    a_start = tl.multiple_of(tl.load(entry, mask=index < slices, other=0), 16)
    x_tile = x + row[:, None] * x_stride + inner[None, :]
    a_tile = arena + (a_start + k.to(tl.int64) * d_in)[None, :] + inner[:, None]
    total = tl.zeros((block_tokens, block_columns), tl.float32)
    for done in tl.range(0, split, block_in, num_stages=stages):
        inside = done + inner < d_in
        hidden = tl.load(x_tile + done, mask=real[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_tile + done, mask=inside[:, None] & live[None, :], other=0.0)
        if upcast:
            hidden = hidden.to(tl.float32)
            a = a.to(tl.float32)
        total = tl.dot(hidden, a, total, input_precision=precision)  # [tokens, columns]

    out = v + (row[:, None] * tl.num_programs(0) + part) * (slices * rank_stride) + column[None, :]
    tl.store(out, total, mask=real[:, None] & live[None, :])
