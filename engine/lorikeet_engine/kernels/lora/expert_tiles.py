"""LoRA of experts for long runs: a program computes a tile of rows, one run after the other.

A run is the neighbouring rows of one expert and one adapter. A program reads A or B of a run once
for all of the run's rows in its tile.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.expert_matrices import has_preceding_a, matrix_at
from lorikeet_engine.kernels.lora.types import ExpertStep, LoraGroup

_MAX_PARTS = 8
_PROGRAMS = 512  # wanted for _shrink, which splits d_in for them: fewer read too little at once
_BLOCK_RANK = 16
_MOST_TILE_ROWS = 64


def add(
    y: torch.Tensor,
    x: torch.Tensor,
    experts: ExpertStep,
    layer: int,
    group: LoraGroup,
    per_run: int,
    *,
    gathered: bool,
) -> None:
    """Compute y[r] += B(r)·A(r)·x[r] in place: see kernels.lora.experts.add_expert_lora.

    With 16-bit dtypes, A·x is rounded to the adapter's dtype.

    per_run: average number of rows that are neighbours and have the same expert and adapter.
    gathered: whether x has a row for each token, instead of one for each row r.
    """
    weights, segments, routed = experts.step.weights, experts.step.segments, experts.routed
    rows, slices, table = len(y), len(group.linears), weights.table
    tile_rows = min(_MOST_TILE_ROWS, max(1, triton.next_power_of_2(per_run)))
    tiles, stride = triton.cdiv(rows, tile_rows), triton.cdiv(segments.max_rank, 16) * 16
    blocks, inner = slices * (stride // _BLOCK_RANK), 512 // weights.arena.itemsize
    split = _split(group.d_in, inner, tiles * blocks)
    parts = triton.cdiv(group.d_in, split)
    v = y.new_empty((rows, parts, slices, stride), dtype=torch.float32)
    block_rows, columns = (16, 512) if tile_rows <= 16 else (_MOST_TILE_ROWS, 128)
    # Without a GPU this is Triton's interpreter, which multiplies the raw bits of bfloat16.
    upcast = x.dtype != weights.arena.dtype or x.device.type == "cpu"
    precision = "ieee" if torch.float32 in (x.dtype, weights.arena.dtype) else "tf32"
    of_rows = (experts.owners, rows, tile_rows, layer, table.stride(0), table.stride(1))
    _shrink[(parts, blocks, tiles)](
        x, weights.arena, table, v, routed.pairs, routed.per_token, *of_rows,
        x.stride(0), group.linears[0], slices, stride, group.d_in, split,
        gathered=gathered, upcast=upcast, precision=precision,
        block_rows=block_rows, block_rank=_BLOCK_RANK, block_in=inner, num_warps=4,
    )  # fmt: skip
    width = group.d_outs[0]
    _expand[(slices * triton.cdiv(width, columns), tiles)](
        v, weights.arena, table, y, routed.pairs, routed.rows, routed.per_token, *of_rows,
        y.stride(0), group.linears[0], slices, stride, width, parts,
        gathered=gathered, upcast=x.device.type == "cpu", precision=precision,
        block_rows=block_rows, block_rank=_BLOCK_RANK, block_out=columns, num_warps=4,
    )  # fmt: skip


def _split(d_in: int, inner: int, programs: int) -> int:
    """Return the number of the d_in inputs that one program reads, a multiple of `inner`.

    inner: number of inputs that a program reads at once.
    programs: number of programs for each part of d_in.
    """
    parts = triton.next_power_of_2(triton.cdiv(_PROGRAMS, programs))
    return int(triton.cdiv(d_in, min(_MAX_PARTS, parts) * inner) * inner)


@triton.jit  # type: ignore[untyped-decorator]
def _run_at(
    owners: tl.tensor, row: tl.tensor, real: tl.tensor, place: tl.tensor, done: tl.tensor
) -> tl.tuple:
    """Find the run of rows of one adapter slot and expert that begins at the tile's row `done`.

    Returns (adapter slot, expert, mask of the run's rows in the tile).

    owners [rows, 2]: adapter slot and expert of each row.
    row: indices of the tile's rows.
    real: mask of the tile's rows that exist.
    place: index of each row in the tile.
    done: number of the tile's rows in earlier runs.
    """
    slot = tl.load(owners + row * 2, mask=real, other=-1)
    expert = tl.load(owners + row * 2 + 1, mask=real, other=0)
    own_slot = tl.sum(tl.where(place == done, slot, 0), 0)
    own_expert = tl.sum(tl.where(place == done, expert, 0), 0)
    mine = real & (slot == own_slot) & (expert == own_expert) & (place >= done)
    return own_slot.to(tl.int64), own_expert.to(tl.int64), mine


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "tile_rows", "layer", "first_linear", "slices", "per_token"]
)
def _shrink(
    x: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    v: tl.tensor,
    pairs: tl.tensor,
    per_token: tl.tensor,
    owners: tl.tensor,
    rows: tl.tensor,
    tile_rows: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    x_stride: tl.tensor,
    first_linear: tl.tensor,
    slices: tl.tensor,
    rank_stride: tl.tensor,
    d_in: tl.tensor,
    split: tl.tensor,
    gathered: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_rank: tl.constexpr,
    block_in: tl.constexpr,
) -> None:
    """Compute A·x of a tile of rows, for some ranks of one slice, over one part of d_in.

    Works run by run: a run is the neighbouring rows of one expert and one adapter. A slice with the
    preceding slice's A is left out, and so are rows but the first of a token whose rows share A and
    x.

    x [rows, d_in]; if gathered [tokens, d_in], and a row reads x of its token.
    arena, table: the adapters' weights, and where each begins (LoraWeights).
    slot_stride, layer_stride: strides of the table.
    first_linear: index of the group's first linear in the table.
    slices: number of linears of the group.
    v: result [rows, parts, slices, rank_stride] float32.
    pairs, per_token: pair of token and expert of each row; experts of a token (RoutedRows).
    owners: adapter slot and expert of each row (ExpertStep).
    rows: number of rows.
    tile_rows: rows of a tile, at most block_rows. split: inputs of a part.
    upcast: whether to multiply in float32.
    precision: precision of tl.dot for float32 factors.
    block_rank, block_in: ranks that the program computes, and inputs read at once.
    """
    part, blocks = tl.program_id(0), rank_stride // block_rank
    index = tl.program_id(1) // blocks
    k = (tl.program_id(1) - index * blocks) * block_rank + tl.arange(0, block_rank)
    place, inner = tl.arange(0, block_rows), part * split + tl.arange(0, block_in)
    row = tl.program_id(2) * tile_rows + place
    real = (place < tile_rows) & (row < rows)
    pair, source = tl.load(pairs + row, mask=real, other=0), row
    if gathered:
        source = pair // per_token
    x_rows = x + source.to(tl.int64)[:, None] * x_stride
    v_rows = v + ((row.to(tl.int64) * tl.num_programs(0) + part) * slices + index) * rank_stride
    of_layer = layer * layer_stride + (first_linear + index) * 3
    count = tl.sum(real.to(tl.int32), 0)
    done = 0
    while done < count:
        slot, expert, mine = _run_at(owners, row, real, place, done)
        done += tl.sum(mine.to(tl.int32), 0)
        entry = table + tl.maximum(slot, 0) * slot_stride + of_layer
        rank = tl.where(slot < 0, 0, tl.load(entry + 2)).to(tl.int32)
        live, begin = k < rank, tl.load(entry)
        if gathered:
            mine &= (begin % 2 == 0) | (pair % per_token == 0)
        needed = tl.max(live.to(tl.int32), 0) * tl.max(mine.to(tl.int32), 0)
        if (needed > 0) & (has_preceding_a(entry, index) == 0):
            a = matrix_at(arena, begin, expert, rank * d_in)
            a_rows = a + k.to(tl.int64)[None, :] * d_in
            total = tl.zeros((block_rows, block_rank), tl.float32)
            for at in range(0, split, block_in):
                inside = at + inner < d_in
                hidden = tl.load(
                    x_rows + (at + inner)[None, :], mask=mine[:, None] & inside[None, :], other=0.0
                )
                weight = tl.load(
                    a_rows + (at + inner)[:, None], mask=inside[:, None] & live[None, :], other=0.0
                )
                if upcast:
                    hidden = hidden.to(tl.float32)
                    weight = weight.to(tl.float32)
                total = tl.dot(hidden, weight, total, input_precision=precision)
            tl.store(v_rows[:, None] + k[None, :], total, mask=mine[:, None] & live[None, :])


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        *("rows", "tile_rows", "layer", "first_linear", "slices", "parts", "per_token")
    ]
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
    rows: tl.tensor,
    tile_rows: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    y_stride: tl.tensor,
    first_linear: tl.tensor,
    slices: tl.tensor,
    rank_stride: tl.tensor,
    width: tl.tensor,
    parts: tl.tensor,
    gathered: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_rank: tl.constexpr,
    block_out: tl.constexpr,
) -> None:
    """Add LoRA's delta to y, for a tile of rows and a block of columns of one slice.

    Works run by run: a run is the neighbouring rows of one expert and one adapter.

    v: result of _shrink.
    arena, table: the adapters' weights, and where each begins (LoraWeights).
    owners: adapter slot and expert of each row (ExpertStep).
    slot_stride, layer_stride: strides of the table.
    rank_stride: columns of v for each linear.
    first_linear: index of the group's first linear in the table.
    slices: number of linears of the group.
    pairs, row_of: pair of token and expert of each row, and row of each pair (RoutedRows).
    per_token: experts of a token.
    rows: number of rows. gathered: whether all rows of a token have the same x.
    tile_rows: rows of a tile, at most block_rows. width: outputs of a slice.
    parts: number of parts of v, which are summed first.
    upcast: whether to multiply in float32.
    precision: precision of tl.dot for float32 factors.
    block_rank, block_out: ranks and columns computed at once.
    """
    blocks = tl.cdiv(width, block_out)
    index = tl.program_id(0) // blocks
    column = (tl.program_id(0) - index * blocks) * block_out + tl.arange(0, block_out)
    place, within = tl.arange(0, block_rows), column < width
    row = tl.program_id(1) * tile_rows + place
    real = (place < tile_rows) & (row < rows)
    y_rows = y + row.to(tl.int64)[:, None] * y_stride + (index * width + column)[None, :]
    of_layer = layer * layer_stride + (first_linear + index) * 3
    count = tl.sum(real.to(tl.int32), 0)
    done = 0
    while done < count:
        slot, expert, mine = _run_at(owners, row, real, place, done)
        done += tl.sum(mine.to(tl.int32), 0)
        entry = table + tl.maximum(slot, 0) * slot_stride + of_layer
        rank = tl.where(slot < 0, 0, tl.load(entry + 2)).to(tl.int32)
        if rank > 0:
            made = row
            if gathered:
                of_tokens = mine & (tl.load(entry) % 2 == 1)
                first_pair = tl.load(pairs + row, mask=of_tokens, other=0) // per_token * per_token
                made = tl.load(row_of + first_pair, mask=of_tokens, other=0)
                made = tl.where(of_tokens, made, row)
            made_by = index - has_preceding_a(entry, index).to(tl.int32)
            v_rows = v + (made.to(tl.int64) * parts * slices + made_by) * rank_stride
            b = matrix_at(arena, tl.load(entry + 1), expert, rank * width)
            total = tl.zeros((block_rows, block_out), tl.float32)
            for first in range(0, rank, block_rank):
                k = first + tl.arange(0, block_rank)
                live = k < rank
                shrunk = tl.zeros((block_rows, block_rank), tl.float32)
                for part in range(parts):
                    shrunk += tl.load(
                        v_rows[:, None] + part * slices * rank_stride + k[None, :],
                        mask=mine[:, None] & live[None, :], other=0.0,
                    )  # fmt: skip
                weight = tl.load(
                    b + k.to(tl.int64)[:, None] * width + column[None, :],
                    mask=live[:, None] & within[None, :], other=0.0,
                )  # fmt: skip
                shrunk = shrunk.to(weight.dtype)
                if upcast:
                    shrunk = shrunk.to(tl.float32)
                    weight = weight.to(tl.float32)
                total = tl.dot(shrunk, weight, total, input_precision=precision)
            kept = mine[:, None] & within[None, :]
            total += tl.load(y_rows, mask=kept, other=0.0).to(tl.float32)
            tl.store(y_rows, total.to(y.dtype.element_ty), mask=kept)
