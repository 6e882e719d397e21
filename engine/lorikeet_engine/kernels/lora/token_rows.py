"""Trained embedding and head rows in Triton, which replace base embeddings and logits."""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.tiles import Tiles, tile_at
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights, check_group, check_rows

_BLOCK_ROWS = 32
_BLOCK_BYTES = 256  # of a row and of x, read at once


def replace_logits(
    logits: torch.Tensor,
    x: torch.Tensor,
    weights: LoraWeights,
    tiles: Tiles,
    max_rows: int,
    layer: int,
    group: LoraGroup,
) -> None:
    """Overwrite logits of adapters' trained tokens, in place: logits[r, id] = x[r] · row(id).

    row(id) is the row of lm_head that r's adapter has trained for token id. Sums are float32, and
    rounded once.

    logits [rows, vocabulary], each row contiguous
    x [rows, hidden]: hidden states
    max_rows: upper bound of the rows that one adapter has trained
    group: the trained head rows as a group of one linear

    Raises ShapeError if an operand's shape or layout does not fit.
    """
    check_group(weights, group)
    check_rows("x", x, group.d_in, weights)
    if logits.numel() == 0 or len(tiles) == 0 or max_rows == 0:
        return
    arena, table = weights.arena, weights.table
    _replace_logits[(len(tiles), triton.cdiv(max_rows, _BLOCK_ROWS))](
        x, arena, table, tiles.rows, logits,
        layer, table.stride(0), table.stride(1), group.linears[0],
        x.stride(0), logits.stride(0), group.d_in,
        # Without a GPU this is Triton's interpreter, which multiplies the raw bits of bfloat16.
        upcast=x.dtype != arena.dtype or x.device.type == "cpu",
        precision="ieee" if torch.float32 in (x.dtype, arena.dtype) else "tf32",
        block_tokens=max(16, triton.next_power_of_2(tiles.config.tokens)),
        block_rows=_BLOCK_ROWS,
        block_hidden=_BLOCK_BYTES // arena.itemsize,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "linear"])  # type: ignore[untyped-decorator]
def _replace_logits(
    x: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    logits: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    linear: tl.tensor,
    x_stride: tl.tensor,
    logits_stride: tl.tensor,
    hidden: tl.tensor,
    upcast: tl.constexpr,
    precision: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_hidden: tl.constexpr,
) -> None:
    """Overwrite the logits of some of an adapter's trained tokens, for the rows of one tile.

    The grid is [tiles, blocks]. A block is block_rows trained head rows of the tile's adapter, each
    the lm_head row of one trained token. A program whose block begins behind the adapter's last
    trained row ends at once.

    x [rows, hidden]: hidden states.
    arena, table: the adapters' weights, and where each begins (LoraWeights).
    tiles: slot of the adapter, first row of x, and number of rows of each tile (Tiles.rows).
    logits [rows, vocabulary]: overwritten in place.
    layer, linear: indices of the trained head rows in the table.
    slot_stride, layer_stride: strides of the table, in elements.
    x_stride, logits_stride: elements from one row to the next.
    hidden: width of hidden states.
    upcast: whether to multiply in float32.
    precision: tl.dot's input_precision.
    block_tokens: rows of x that a program multiplies: the most that a tile has, rounded up to a
        power of two, and at least 16.
    block_rows: trained head rows that a program multiplies with each of these rows of x.
    block_hidden: columns multiplied at once.
    """
    slot, start, length = tile_at(tiles, tl.program_id(0))
    if (length == 0) | (slot < 0):
        return
    entry = table + slot * slot_stride + layer * layer_stride + linear * 3
    count = tl.load(entry + 2).to(tl.int32)
    first = tl.program_id(1) * block_rows
    if first >= count:
        return
    k = first + tl.arange(0, block_rows)
    token = tl.arange(0, block_tokens)
    row, real = (start + token).to(tl.int64), token < length
    begin = arena + tl.multiple_of(tl.load(entry), 16) + k[:, None].to(tl.int64) * hidden
    total = tl.zeros((block_tokens, block_rows), tl.float32)
    for done in range(0, hidden, block_hidden):
        column = done + tl.arange(0, block_hidden)
        inside = (column < hidden)[None, :]
        a = tl.load(
            x + row[:, None] * x_stride + column[None, :], mask=real[:, None] & inside, other=0.0
        )
        b = tl.load(begin + column[None, :], mask=(k < count)[:, None] & inside, other=0.0)
        if upcast:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, tl.trans(b), total, input_precision=precision)
    ids = token_ids_at(arena + tl.load(entry + 1), k, count)
    out = logits + row[:, None] * logits_stride + ids[None, :]
    tl.store(out, total.to(logits.dtype.element_ty), mask=real[:, None] & (k < count)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def replace_rows(
    entry: tl.tensor,
    arena: tl.tensor,
    y_rows: tl.tensor,
    ids: tl.tensor,
    real: tl.tensor,
    hidden: tl.tensor,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Overwrite embeddings of a tile of tokens with their adapter's trained embedding rows.

    Overwrites nothing for an adapter without trained rows. The rows' ids ascend: a token's row is
    found by halving the rows that it may be, log2(rows) times.

    entry: pointer to the trained embedding rows' entry in LoraWeights.table.
    arena: weights of all adapters, which hold the trained rows.
    y_rows [tokens, 1]: pointers to the embeddings.
    ids [tokens]: token ids.
    real [tokens]: whether the tile has this token.
    hidden: width of an embedding.
    block_tokens: tokens of the tile.
    block_columns: columns copied at once.
    """
    count = tl.load(entry + 2).to(tl.int32)
    if count > 0:
        digits = arena + tl.load(entry + 1)
        found = tl.zeros((block_tokens,), tl.int32)  # the last row whose id is not above the token
        left = count
        while left > 1:
            half = left // 2
            found = tl.where(token_ids_at(digits, found + half, count) <= ids, found + half, found)
            left -= half
        replaced = real & (token_ids_at(digits, found, count) == ids)
        rows = arena + tl.multiple_of(tl.load(entry), 16) + found.to(tl.int64)[:, None] * hidden
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
