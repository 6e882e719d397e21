"""Trained embedding and head rows in Triton, which replace base embeddings and logits."""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.tiles import tile_at
from lorikeet_engine.kernels.lora.types import UnexpandedDelta

_BLOCK_ROWS = 32


def place_logits(made: UnexpandedDelta, logits: torch.Tensor) -> None:
    """Overwrite logits of adapters' trained tokens, in place: logits[r, id] = x[r] · row(id).

    row(id) is the row of lm_head that r's adapter has trained for token id.

    made: output of `shrink` for the trained head rows as a group of one linear: x[r] · row(id) of
      all trained ids
    logits [rows, vocabulary], each row contiguous
    """
    parts, table, tiles = made.v.shape[1], made.weights.table, made.tiles
    if logits.numel() == 0 or len(tiles) == 0:
        return
    _place_logits[(len(tiles),)](
        made.v, made.weights.arena, table, tiles.rows, logits,
        made.layer, table.stride(0), table.stride(1), made.group.linears[0],
        parts, tiles.rank_stride, logits.stride(0),
        block_tokens=triton.next_power_of_2(tiles.config.tokens),
        block_rows=_BLOCK_ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "linear", "parts"])  # type: ignore[untyped-decorator]
def _place_logits(
    v: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    logits: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    linear: tl.tensor,
    parts: tl.tensor,
    rank_stride: tl.tensor,
    logits_stride: tl.tensor,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    """Overwrite logits of trained tokens for one tile of rows, some trained tokens at a time.

    v: result of `shrink`; its parts are summed first.
    arena, table: the adapters' weights, and where each begins (LoraWeights).
    slot_stride, layer_stride: strides of the table.
    rank_stride: columns of v for each linear.
    tiles: slot and tokens of each tile (Tiles.rows).
    linear: index of the trained head rows in the table.
    block_tokens: number of rows of a tile.
    block_rows: number of trained tokens computed at once.
    """
    slot, start, length = tile_at(tiles, tl.program_id(0))
    if (length == 0) | (slot < 0):
        return
    entry = table + slot * slot_stride + layer * layer_stride + linear * 3
    count = tl.load(entry + 2).to(tl.int32)
    digits = arena + tl.load(entry + 1)
    token = tl.arange(0, block_tokens)
    row, real = (start + token).to(tl.int64), token < length
    for first in range(0, count, block_rows):
        k = first + tl.arange(0, block_rows)
        ids = token_ids_at(digits, k, count)
        inside = real[:, None] & (k < count)[None, :]
        total = tl.zeros((block_tokens, block_rows), tl.float32)
        v_rows = v + row[:, None] * parts * rank_stride + k[None, :]
        for part in range(parts):
            total += tl.load(v_rows + part * rank_stride, mask=inside, other=0.0)
        out = logits + row[:, None] * logits_stride + ids[None, :]
        tl.store(out, total.to(logits.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def replace_rows(
    entry: tl.tensor,
    arena: tl.tensor,
    y_rows: tl.tensor,
    ids: tl.tensor,
    real: tl.tensor,
    hidden: tl.tensor,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Overwrite embeddings of a tile of tokens with their adapter's trained embedding rows.

    Overwrites nothing for an adapter without trained rows.

    entry: pointer to the trained embedding rows' entry in LoraWeights.table.
    arena: weights of all adapters, which hold the trained rows.
    y_rows [tokens, 1]: pointers to the embeddings.
    ids [tokens]: token ids.
    real [tokens]: whether the tile has this token.
    hidden: width of an embedding.
    block_tokens: tokens of the tile.
    block_rows: trained tokens compared at once.
    block_columns: columns copied at once.
    """
    count = tl.load(entry + 2).to(tl.int32)
    if count > 0:
        digits = arena + tl.load(entry + 1)
        found = tl.zeros((block_tokens,), tl.int32) - 1
        for first in range(0, count, block_rows):
            k = first + tl.arange(0, block_rows)
            same = ids[:, None] == token_ids_at(digits, k, count)[None, :]
            found = tl.maximum(found, tl.max(tl.where(same, k[None, :], -1), 1))
        replaced = real & (found >= 0)
        rows = arena + tl.load(entry) + found.to(tl.int64)[:, None] * hidden
        for first in range(0, hidden, block_columns):
            column = first + tl.arange(0, block_columns)
            inside = replaced[:, None] & (column < hidden)[None, :]
            values = tl.load(rows + column[None, :], mask=inside, other=0.0)
            out = y_rows + column[None, :]
            tl.store(out, values.to(tl.float32).to(y_rows.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def token_ids_at(digits: tl.tensor, k: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return the ids of some of an adapter's trained tokens.

    digits: pointer to the ids, three base-256 digits each.
    k: indices of the wanted tokens among the trained tokens.
    count: number of trained tokens; the result is −1 for k from `count` on.
    """
    at, known = digits + k * 3, k < count
    low = tl.load(at, mask=known, other=0.0).to(tl.float32)
    middle = tl.load(at + 1, mask=known, other=0.0).to(tl.float32)
    high = tl.load(at + 2, mask=known, other=0.0).to(tl.float32)
    ids = (low + 256 * middle + 65536 * high).to(tl.int32)  # float32 holds integers to 2^24
    return tl.where(known, ids, -1)
