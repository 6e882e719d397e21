"""SiLU-and-mul of a prefill in Triton, which expands gate_up's LoRA delta in the same launch.

gate_up's delta is two thirds of all deltas of a layer. Writing it by `expand` and reading it back
would cost a prefill more time than all other work of LoRA; in this kernel it never leaves the
registers.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.lora import composition
from lorikeet_engine.kernels.lora.composition import members_at, ranks_at
from lorikeet_engine.kernels.lora.expand import PARTS_AT_ONCE, multiply, sum_parts, vectors_at
from lorikeet_engine.kernels.lora.tiles import tile_at
from lorikeet_engine.kernels.lora.types import UnexpandedDelta, check_rows


def expand_act_and_mul(
    x: torch.Tensor, shrunk: UnexpandedDelta, *, gelu: bool = False
) -> torch.Tensor:
    """Compute silu(g + B_g·v_g) · (u + B_u·v_u) of x = [g, u].

    x [tokens, 2 · width]: output of gate_up without LoRA
    shrunk: output of `shrink` for gate_up; if it has vectors, gains and biases of outputs, g and u
      with LoRA become (1 + gain) · g + bias and (1 + gain) · u + bias
    gelu: GELU instead of SiLU
    → [tokens, width]

    v is rounded to the adapter's dtype; LoRA is added in float32. Raises ShapeError if an operand's
    shape or layout does not fit.
    """
    v, weights, tiles = shrunk.v, shrunk.weights, shrunk.tiles
    width, config = x.shape[1] // 2, tiles.config
    if shrunk.group.d_outs != (width, width):
        raise ShapeError(f"gate_up has {x.shape[1]} columns: adapters have {shrunk.group.d_outs}")
    check_rows("x", x, 2 * width, weights)
    y = x.new_empty((len(x), width))
    columns, ranks = config.expand.columns // 2, tiles.ranks_at_once  # two products at once
    grid = (triton.cdiv(width, columns * config.expand.blocks), len(tiles))
    _expand_act_and_mul[grid](
        x, y, v, weights.arena, weights.table, tiles.rows, shrunk.layer,
        weights.table.stride(0), weights.table.stride(1), x.stride(0), tiles.rank_stride,
        shrunk.group.linears[0], v.shape[1], *shrunk.vector_operands(),
        *composition.operands(weights, tiles),
        width=width,
        # Without a GPU this is Triton's interpreter, which multiplies the raw bits of bfloat16.
        upcast=x.device.type == "cpu",
        block_tokens=config.tokens,
        block_parts=PARTS_AT_ONCE,
        block_rank=ranks,
        more_ranks=tiles.rank_stride > ranks,
        block_out=columns,
        blocks=config.expand.blocks,
        gelu=gelu,
        num_warps=config.expand.warps,
    )  # fmt: skip
    return y


@triton.jit  # type: ignore[untyped-decorator]
def activated(x: tl.tensor, gelu: tl.constexpr) -> tl.tensor:
    """Return silu(x), or gelu(x) by the tanh formula with tanh(u) = 2 · sigmoid(2u) − 1."""
    if gelu:
        x2: tl.constexpr = 2 * 0.7978845608028654  # √(2 / π)
        return x / (1.0 + tl.exp(-x2 * (x + 0.044715 * x * x * x)))
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["layer", "first_linear", "parts"])  # type: ignore[untyped-decorator]
def _expand_act_and_mul(
    x: tl.tensor,
    y: tl.tensor,
    v: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    layer: tl.tensor,
    slot_stride: tl.tensor,
    layer_stride: tl.tensor,
    x_stride: tl.tensor,
    rank_stride: tl.tensor,
    first_linear: tl.tensor,
    parts: tl.tensor,
    vectors: tl.tensor,
    vectors_of_slot: tl.tensor,
    vectors_of_layer: tl.tensor,
    members: tl.tensor,
    member_weights: tl.tensor,
    width: tl.constexpr,
    upcast: tl.constexpr,
    block_tokens: tl.constexpr,
    block_parts: tl.constexpr,
    block_rank: tl.constexpr,
    more_ranks: tl.constexpr,
    block_out: tl.constexpr,
    blocks: tl.constexpr,
    gelu: tl.constexpr,
) -> None:
    """Compute the activation for a tile of tokens and some blocks of columns.

    Tokens without an adapter are computed like those of an adapter of rank 0.

    x: gates, then values, without LoRA. y: result. gelu: GELU instead of SiLU.
    All other operands: see expand._expand.
    """
    slot, start, length = tile_at(tiles, tl.program_id(1))
    if length == 0:
        return
    linear = layer * layer_stride + first_linear * 3
    entry = table + slot * slot_stride + linear
    known = slot >= 0
    token, k = tl.arange(0, block_tokens), tl.arange(0, block_rank)
    if members is not None:
        gate, gate_rank = members_at(
            table, members, member_weights, slot, slot_stride, linear, known, 1
        )
        up, up_rank = members_at(
            table, members, member_weights, slot, slot_stride, linear + 3, known, 1
        )
        gate_begins, up_begins = ranks_at(gate, k, width)[0], ranks_at(up, k, width)[0]
    else:
        gate, up = None, None
        gate_rank = tl.load(entry + 2, mask=known, other=0).to(tl.int32)
        up_rank = tl.load(entry + 5, mask=known, other=0).to(tl.int32)
        gate_b = arena + tl.multiple_of(tl.load(entry + 1, mask=known, other=0), 16)
        up_b = arena + tl.multiple_of(tl.load(entry + 4, mask=known, other=0), 16)
    if vectors is not None:
        own = vectors + slot * vectors_of_slot + layer * vectors_of_layer + first_linear
        gate_vectors = tl.load(own, mask=known, other=-1)
        up_vectors = tl.load(own + 1, mask=known, other=-1)
    row, real = (start + token).to(tl.int64), token < length
    part_stride = 2 * rank_stride
    gate_v = v + row[:, None] * (parts * part_stride) + k[None, :]
    up_v = gate_v + rank_stride
    gate_ranks = sum_parts(gate_v, real, k, gate_rank, parts, part_stride, block_parts)
    up_ranks = sum_parts(up_v, real, k, up_rank, parts, part_stride, block_parts)

    first = tl.program_id(0) * (block_out * blocks)
    for block in tl.range(blocks, num_stages=2):
        column = first + block * block_out + tl.arange(0, block_out)
        inside = column < width
        mask = real[:, None] & inside[None, :]
        at = x + row[:, None] * x_stride + column[None, :]
        gates = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
        if members is not None:
            gate_tile = arena + gate_begins[:, None] + column[None, :]
            up_tile = arena + up_begins[:, None] + column[None, :]
        else:
            place = k[:, None] * width + column[None, :]
            gate_tile, up_tile = gate_b + place, up_b + place
        gates += multiply(
            gate_ranks, gate_v, gate_tile, real, inside, k, gate_rank, width, arena, gate, column,
            parts, part_stride, block_parts, block_rank, more_ranks, upcast,
        )  # fmt: skip
        values += multiply(
            up_ranks, up_v, up_tile, real, inside, k, up_rank, width, arena, up, column,
            parts, part_stride, block_parts, block_rank, more_ranks, upcast,
        )  # fmt: skip
        if vectors is not None:
            gain, bias = vectors_at(arena, gate_vectors, width, column, inside)
            gates += gain[None, :] * gates + bias[None, :]
            gain, bias = vectors_at(arena, up_vectors, width, column, inside)
            values += gain[None, :] * values + bias[None, :]
        out = activated(gates, gelu) * values
        tl.store(y + row[:, None] * width + column[None, :], out.to(y.dtype.element_ty), mask=mask)
