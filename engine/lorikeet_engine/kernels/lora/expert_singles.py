"""LoRA of experts for short runs: a program computes one row, without tensor cores.

A run is the neighbouring rows of one expert and one adapter. A tile of several rows, as in
expert_tiles, would hold mostly zeros.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.expert_matrices import has_preceding_a, matrix_at
from lorikeet_engine.kernels.lora.types import ExpertStep, LoraGroup

_BLOCK_RANK = 16
_BLOCK = 1024  # of d_in and d_out: smaller blocks take longer to launch than to read
_WARP_COLUMNS = 256  # 16 bytes a thread: no sum of _expand crosses threads


def add(
    y: torch.Tensor,
    x: torch.Tensor,
    experts: ExpertStep,
    layer: int,
    group: LoraGroup,
    *,
    gathered: bool,
) -> None:
    """Compute y[r] += B(r)·A(r)·x[r] in place: see kernels.lora.experts.add_expert_lora.

    With 16-bit dtypes, A·x is rounded to the adapter's dtype.

    gathered: whether x has a row for each token, instead of one for each row r.
    """
    weights, segments, routed = experts.step.weights, experts.step.segments, experts.routed
    rows, slices, table, width = len(y), len(group.linears), weights.table, group.d_outs[0]
    stride = triton.cdiv(segments.max_rank, _BLOCK_RANK) * _BLOCK_RANK
    block_in, block_out = (min(_BLOCK, triton.next_power_of_2(d)) for d in (group.d_in, width))
    parts = triton.cdiv(group.d_in, block_in)
    v = y.new_empty((rows, parts, slices, stride), dtype=torch.float32)
    of_layer = (experts.owners, layer, table.stride(0), table.stride(1), group.linears[0])
    _shrink[(rows, parts, slices * (stride // _BLOCK_RANK))](
        x, weights.arena, table, v, routed.pairs, routed.per_token, *of_layer,
        x.stride(0), slices, stride, group.d_in,
        gathered=gathered, block_rank=_BLOCK_RANK, block_in=block_in,
        num_warps=max(1, block_in // _WARP_COLUMNS),
    )  # fmt: skip
    _expand[(rows, slices * triton.cdiv(width, block_out))](
        v, weights.arena, table, y, routed.pairs, routed.rows, routed.per_token, *of_layer,
        y.stride(0), slices, stride, width, parts,
        gathered=gathered, block_parts=triton.next_power_of_2(parts),
        block_rank=_BLOCK_RANK, block_out=block_out,
        num_warps=max(1, block_out // _WARP_COLUMNS),
    )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["layer", "first_linear", "slices", "per_token"]
)
def _shrink(
    x: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    v: tl.tensor,
    pairs: tl.tensor,
    per_token: tl.tensor,
    owners: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    first_linear: tl.tensor,
    x_stride: tl.tensor,
    slices: tl.tensor,
    rank_stride: tl.tensor,
    d_in: tl.tensor,
    gathered: tl.constexpr,
    block_rank: tl.constexpr,
    block_in: tl.constexpr,
) -> None:
    """Compute A·x of one row, for some ranks of one slice, over one part of d_in.

    Leaves out a slice with the preceding slice's A, and a token's rows but the first if they share
    A and x.

    x [rows, d_in]; if gathered [tokens, d_in], and a row reads x of its token.
    arena, table: the adapters' weights, and where each begins (LoraWeights).
    slot_stride, layer_stride: strides of the table.
    first_linear: index of the group's first linear in the table.
    slices: number of linears of the group.
    v: result [rows, parts, slices, rank_stride] float32.
    pairs, per_token: pair of token and expert of each row; experts of a token (RoutedRows).
    owners: adapter slot and expert of each row (ExpertStep).
    block_rank, block_in: ranks that the program computes, and inputs of a part.
    """
    row, part, blocks = tl.program_id(0), tl.program_id(1), rank_stride // block_rank
    index = tl.program_id(2) // blocks
    first = (tl.program_id(2) - index * blocks) * block_rank
    slot = tl.load(owners + row * 2)
    if slot < 0:
        return
    entry = table + slot.to(tl.int64) * slot_stride + layer * layer_stride
    entry += (first_linear + index) * 3
    begin, rank = tl.load(entry), tl.load(entry + 2).to(tl.int32)
    if first >= rank:
        return
    if has_preceding_a(entry, index):
        return
    source, again = row, row < 0
    if gathered:
        pair = tl.load(pairs + row)
        source = pair // per_token
        again = (begin % 2 == 1) & (pair % per_token > 0)
    if again:
        return
    expert = tl.load(owners + row * 2 + 1).to(tl.int64)
    a = matrix_at(arena, begin, expert, rank * d_in)
    k, inner = first + tl.arange(0, block_rank), part * block_in + tl.arange(0, block_in)
    live, inside = k < rank, inner < d_in
    weight = tl.load(
        a + k.to(tl.int64)[:, None] * d_in + inner[None, :],
        mask=live[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    hidden = tl.load(x + source.to(tl.int64) * x_stride + inner, mask=inside, other=0.0)
    total = tl.sum(weight.to(tl.float32) * hidden.to(tl.float32)[None, :], 1)
    v_row = v + ((row.to(tl.int64) * tl.num_programs(1) + part) * slices + index) * rank_stride
    tl.store(v_row + k, total, mask=live)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["layer", "first_linear", "slices", "parts", "per_token"]
)
def _expand(
    v: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    y: tl.tensor,
    pairs: tl.tensor,
    row_of: tl.tensor,
    per_token: tl.tensor,
    owners: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    first_linear: tl.tensor,
    y_stride: tl.tensor,
    slices: tl.tensor,
    rank_stride: tl.tensor,
    width: tl.tensor,
    parts: tl.tensor,
    gathered: tl.constexpr,
    block_parts: tl.constexpr,
    block_rank: tl.constexpr,
    block_out: tl.constexpr,
) -> None:
    """Add LoRA's delta to y, for one row and a block of columns of one slice.

    v: result of _shrink.
    arena, table: the adapters' weights, and where each begins (LoraWeights).
    owners: adapter slot and expert of each row (ExpertStep).
    pairs, row_of: pair of token and expert of each row, and row of each pair (RoutedRows).
    per_token: experts of a token.
    gathered: whether all rows of a token have the same x.
    slot_stride, layer_stride: strides of the table.
    rank_stride: columns of v for each linear.
    first_linear: index of the group's first linear in the table.
    slices: number of linears of the group.
    width: outputs of a slice.
    parts: number of parts of v, which are summed first.
    block_parts, block_rank, block_out: parts, ranks and columns computed at once.
    """
    row, blocks = tl.program_id(0), tl.cdiv(width, block_out)
    index = tl.program_id(1) // blocks
    slot = tl.load(owners + row * 2)
    if slot < 0:
        return
    entry = table + slot.to(tl.int64) * slot_stride + layer * layer_stride
    entry += (first_linear + index) * 3
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return
    expert = tl.load(owners + row * 2 + 1).to(tl.int64)
    b = matrix_at(arena, tl.load(entry + 1), expert, rank * width)
    made, made_by = row, index - has_preceding_a(entry, index).to(tl.int32)
    if (tl.load(entry) % 2 == 1) & gathered:
        made = tl.load(row_of + tl.load(pairs + row) // per_token * per_token)
    column = (tl.program_id(1) - index * blocks) * block_out + tl.arange(0, block_out)
    within, part = column < width, tl.arange(0, block_parts)
    v_parts = v + ((made.to(tl.int64) * parts + part) * slices + made_by) * rank_stride
    y_row = y + row.to(tl.int64) * y_stride + index * width + column
    total = tl.load(y_row, mask=within, other=0.0).to(tl.float32)
    for first in range(0, rank, block_rank):
        k = first + tl.arange(0, block_rank)
        live = k < rank
        weight = tl.load(
            b + k.to(tl.int64)[:, None] * width + column[None, :],
            mask=live[:, None] & within[None, :], other=0.0,
        )  # fmt: skip
        shrunk = tl.load(
            v_parts[:, None] + k[None, :], mask=(part < parts)[:, None] & live[None, :], other=0.0
        )
        rounded = tl.sum(shrunk, 0).to(weight.dtype).to(tl.float32)
        total += tl.sum(weight.to(tl.float32) * rounded[:, None], 0)
    tl.store(y_row, total.to(y.dtype.element_ty), mask=within)
