"""LoRA's first product for embeddings, in Triton.

The input is a token id, so A·x is a column of A. The same launch writes the adapters' trained
embedding rows (token_rows.py), which saves a launch.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora import composition
from lorikeet_engine.kernels.lora.composition import MOST
from lorikeet_engine.kernels.lora.tiles import Tiles, tile_at
from lorikeet_engine.kernels.lora.token_rows import replace_rows
from lorikeet_engine.kernels.lora.types import (
    LoraGroup,
    LoraWeights,
    UnexpandedDelta,
    check_group,
    check_rows,
)


def gather(
    token_ids: torch.Tensor,
    y: torch.Tensor,
    weights: LoraWeights,
    tiles: Tiles,
    layer: int,
    group: LoraGroup,
    rows: LoraGroup,
) -> UnexpandedDelta:
    """Compute v[t, 0, 0, k] = A(t)[k, token_ids[t]], and write trained embedding rows to y.

    For a composition, a weighted sum of adapters, v is multiplied by the weight of the rank's
    adapter.

    token_ids [tokens] int64
    y [tokens, hidden], each row contiguous: embeddings; y[t] is overwritten if t's adapter has a
      row for token_ids[t]
    group: the embeddings as a group of one linear
    rows: the adapters' trained embedding rows as a group of one linear
    → v [tokens, 1, 1, tiles.rank_stride] float32, undefined for tokens without an adapter, and in
      columns from the adapter's rank on

    Raises ShapeError if an operand's shape or layout does not fit.
    """
    check_group(weights, group)
    check_rows("y", y, rows.d_in, weights)
    v = torch.empty(
        (len(token_ids), 1, 1, tiles.rank_stride), dtype=torch.float32, device=token_ids.device
    )
    if v.numel() and len(tiles):
        _gather[(len(tiles),)](
            token_ids, weights.arena, weights.table, tiles.rows, v, y,
            layer, weights.table.stride(0), weights.table.stride(1), tiles.rank_stride,
            group.linears[0], rows.linears[0], y.stride(0), rows.d_in,
            *composition.operands(weights, tiles),
            block_tokens=triton.next_power_of_2(tiles.config.tokens),
            block_rank=16,
            block_columns=max(64, 1024 // triton.next_power_of_2(tiles.config.tokens)),
        )  # fmt: skip
    return UnexpandedDelta(v, weights, tiles, layer, group)


@triton.jit(do_not_specialize=["layer", "linear", "rows_linear"])  # type: ignore[untyped-decorator]
def _gather(
    token_ids: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    v: tl.tensor,
    y: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    rank_stride: tl.tensor,
    linear: tl.tensor,
    rows_linear: tl.tensor,
    y_stride: tl.tensor,
    hidden: tl.tensor,
    members: tl.tensor,
    member_weights: tl.tensor,
    block_tokens: tl.constexpr,
    block_rank: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Gather columns of A for one tile of tokens, and write trained embedding rows to y.

    Ranks are gathered some at a time, so nothing is gathered for an adapter of rank 0.

    token_ids: id of each token. v: result, a column of A for each token. y: embeddings.
    arena, table: the adapters' weights, and where each begins (LoraWeights).
    tiles: slot and tokens of each tile (Tiles.rows).
    slot_stride, layer_stride: strides of the table.
    rank_stride: columns of v for each linear.
    linear, rows_linear: indices in the table of the embeddings and of the trained embedding rows.
    hidden: width of an embedding.
    members, member_weights: adapters of each composition (a weighted sum of adapters), and their
        weights; None: a step without compositions.
    block_tokens: tokens of a tile.
    block_rank: ranks copied at once.
    block_columns: columns of y copied at once.
    """
    slot, start, length = tile_at(tiles, tl.program_id(0))
    if (length == 0) | (slot < 0):
        return
    of_layer = table + slot * slot_stride + layer * layer_stride
    entry = of_layer + linear * 3
    rank = tl.load(entry + 2).to(tl.int32)
    token, k = tl.arange(0, block_tokens), tl.arange(0, block_rank)
    row, real = (start + token).to(tl.int64), token < length
    ids = tl.load(token_ids + row, mask=real, other=0)
    replace_rows(
        of_layer + rows_linear * 3, arena, y + row[:, None] * y_stride, ids, real, hidden,
        block_tokens, block_columns,
    )  # fmt: skip
    v_rows = v + row[:, None] * rank_stride + k[None, :]
    if members is not None:
        for i in range(MOST):
            member = tl.load(members + slot * MOST + i).to(tl.int64)
            if member >= 0:
                entry = table + member * slot_stride + layer * layer_stride + linear * 3
                rank = tl.load(entry + 2).to(tl.int32)
                weight = tl.load(member_weights + slot * MOST + i)
                a_rows = arena + tl.load(entry) + ids[:, None] * rank + k[None, :]
                _copy_ranks(a_rows, v_rows, real, k, rank, weight, block_rank)
                v_rows += rank
    else:
        a_rows = arena + tl.load(entry) + ids[:, None] * rank + k[None, :]
        _copy_ranks(a_rows, v_rows, real, k, rank, None, block_rank)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_ranks(
    a_rows: tl.tensor,
    v_rows: tl.tensor,
    real: tl.tensor,
    k: tl.tensor,
    rank: tl.tensor,
    weight: tl.tensor,
    block_rank: tl.constexpr,
) -> None:
    """Copy an adapter's column of A for each token to v, some ranks at a time.

    a_rows, v_rows: pointers to the first ranks of each token's column, and of its row of v.
    real: mask of the tokens that exist. k: indices of the ranks. rank: number of ranks.
    weight: multiplies the ranks; None: 1.
    block_rank: ranks copied at once.
    """
    for done in range(0, rank, block_rank):
        inside = real[:, None] & (k < rank - done)[None, :]
        values = tl.load(a_rows + done, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            values *= weight
        tl.store(v_rows + done, values, mask=inside)
