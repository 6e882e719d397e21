"""Experts of a single token in Triton: three launches, in which each weight is read once.

The launches choose the experts, compute gate_up's products with act_and_mul, and compute down's
products with their weighted sum. Weights are read as in kernels/gemv.py, without sorting. Inputs of
FP8 weights are not rounded.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.fp8 import Fp8Rows, kernel_arguments
from lorikeet_engine.kernels.gemv import GemvConfig, scaled
from lorikeet_engine.kernels.lora.expand_act import activated
from lorikeet_engine.kernels.moe import ClampedBiases
from lorikeet_engine.kernels.moe.clamp import clamped

GATE_UP = GemvConfig(rows=4, columns=2048, warps=4, summed=8)
"""Launch parameters of gate_up's products.

A program's rows belong to one expert: half of them gates and half the values that they gate.
"""
DOWN = GemvConfig(rows=4, columns=256, warps=8, summed=8)
FP8_DOWN = GemvConfig(rows=1, columns=256, warps=4, summed=8)
"""Launch parameters of down's products with FP8 weights; `rows` counts rows of each expert."""


def gate_up_of(
    x: torch.Tensor,
    weight: torch.Tensor | Fp8Rows,
    chosen: torch.Tensor,
    *,
    gelu: bool,
    biases: ClampedBiases | None = None,
    squared_relu: bool = False,
) -> torch.Tensor:
    """Compute act_and_mul of x·weight[e]ᵀ for each expert e chosen for a single token.

    x [1, d_in]
    weight [experts, d_out, d_in]
    chosen [1, per_token] int32: the token's experts
    gelu: GELU instead of SiLU
    biases: biases and clamp of clamped_swiglu, which then replaces act_and_mul
    squared_relu: squared ReLU instead of act_and_mul; there are no gates
    → [per_token, d_out / 2]; without gates [per_token, d_out]
    """
    matrices, scales, high, wide = kernel_arguments(weight)
    _, d_out, d_in = matrices.shape
    y = x.new_empty((chosen.shape[1], d_out if squared_relu else d_out // 2))
    block = min(GATE_UP.columns, triton.next_power_of_2(d_in))
    _gate_up[(triton.cdiv(d_out, GATE_UP.rows), len(y))](
        x, matrices, scales, chosen, y, *bias_arguments(biases), d_out, d_in, high, wide, gelu,
        squared_relu, GATE_UP.rows, block, min(GATE_UP.summed, block),
        num_warps=GATE_UP.warps,
    )  # fmt: skip
    return y


def bias_arguments(biases: ClampedBiases | None) -> tuple[torch.Tensor | None, float, float]:
    """Return (biases of gate_up, alpha, limit), the arguments of clamped_swiglu in kernels.

    Without biases, these are (None, 0, 0).
    """
    if biases is None:
        return None, 0.0, 0.0
    return biases.gate_up, biases.clamp.alpha, biases.clamp.limit


def down_of(
    x: torch.Tensor,
    weight: torch.Tensor | Fp8Rows,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute Σ_j shares[j] · (x[j]·weight[e]ᵀ) over the experts e = chosen[j] of a single token.

    x [per_token, d_in]: each expert's input
    weight [experts, d_out, d_in]
    chosen [1, per_token] int32: the token's experts
    shares [1, per_token] float32: weights of the experts
    biases [experts, d_out]: added to the products; None: no biases
    → [1, d_out]

    Each product is rounded before the sum, as if products and sum had a launch each.
    """
    matrices, scales, high, wide = kernel_arguments(weight)
    config = DOWN if scales is None else FP8_DOWN
    _, d_out, d_in = matrices.shape
    y = x.new_empty((1, d_out))
    block = min(config.columns, triton.next_power_of_2(d_in))
    _down[(triton.cdiv(d_out, config.rows),)](
        x, matrices, scales, chosen, shares, biases, y, d_out, d_in, high, wide,
        len(x), triton.next_power_of_2(len(x)), config.rows, block, min(config.summed, block),
        num_warps=config.warps,
    )  # fmt: skip
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    chosen: tl.tensor,
    y: tl.tensor,
    biases: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    d_out: tl.constexpr,
    d_in: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    gelu: tl.constexpr,
    squared_relu: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    summed: tl.constexpr,
) -> None:
    """Compute some activations of one expert: half of a tile's rows gate the other half, if any.

    x, weight: input, and weights of all experts. chosen: the token's experts. y: result.
    gelu: GELU instead of SiLU. squared_relu: squared ReLU without gates instead.
    scales: of an FP8 weight; None: floats.
    biases, alpha, limit: biases of gate_up and constants of clamped_swiglu (Clamp).
    high, wide: height and width of the weight's blocks that have scales; wide 0: rows have scales.
    rows: rows of a tile of the weight.
    summed: neighbouring columns that a thread adds up as it reads them.
    block: columns read at once.
    """
    tile, index = tl.program_id(0), tl.program_id(1)
    place = tl.minimum(tile * rows + tl.arange(0, rows), d_out - 1)
    row = place
    if not squared_relu:
        row = place // 2 + place % 2 * (d_out // 2)
    row = tl.load(chosen + index).to(tl.int64) * d_out + row
    column = tl.arange(0, block)
    total = tl.zeros((rows, block // summed), tl.float32)
    for start in tl.static_range(0, d_in, block):
        inside = start + column < d_in
        at = weight + row[:, None] * d_in + (start + column)[None, :]
        weights = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
        values = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
        products = weights * values[None, :]
        sums = tl.sum(tl.reshape(products, (rows, block // summed, summed)), 2)
        total += scaled(sums, scales, row, start, d_in, high, wide, block, summed)
    out = tl.sum(total, 1)
    if scales is not None and wide == 0:
        out *= tl.load(scales + row)
    rounded = out.to(y.dtype.element_ty).to(tl.float32)
    if biases is not None:
        rounded += tl.load(biases + row).to(tl.float32)
    if squared_relu:
        out = tl.maximum(rounded, 0.0)
        out = (out * out).to(y.dtype.element_ty)
        place = tile * rows + tl.arange(0, rows)
        tl.store(y + index * d_out + place, out, mask=place < d_out)
    else:
        gates, values = tl.split(tl.reshape(rounded, (rows // 2, 2)))
        if biases is None:
            out = activated(gates, gelu) * values
        else:
            out = clamped(gates, values, alpha, limit)
        place = tile * (rows // 2) + tl.arange(0, rows // 2)
        mask = place < d_out // 2
        tl.store(y + index * (d_out // 2) + place, out.to(y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _down(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    chosen: tl.tensor,
    shares: tl.tensor,
    biases: tl.tensor,
    y: tl.tensor,
    d_out: tl.constexpr,
    d_in: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    experts: tl.constexpr,
    expert_block: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    summed: tl.constexpr,
) -> None:
    """Compute `rows` elements of the weighted sum of the outputs of the token's experts.

    x, weight: input of each of the token's experts, and weights of all experts. y: result.
    chosen, shares: the token's experts, and their weights in the sum.
    biases: biases of all experts, added to their outputs; None: no biases.
    scales: of an FP8 weight; None: floats.
    high, wide: height and width of the weight's blocks that have scales; wide 0: rows have scales.
    experts: number of the token's experts; expert_block: that, rounded up to a power of two.
    rows: rows of a tile of the weight.
    summed: neighbouring columns that a thread adds up as it reads them.
    block: columns read at once.
    """
    each = tl.arange(0, expert_block)
    expert = tl.load(chosen + each, mask=each < experts, other=0).to(tl.int64)
    share = tl.load(shares + each, mask=each < experts, other=0.0)
    row = tl.minimum(tl.program_id(0) * rows + tl.arange(0, rows), d_out - 1)
    line = expert[:, None] * d_out + row[None, :]  # [experts, rows]
    column = tl.arange(0, block)
    total = tl.zeros((expert_block, rows, block // summed), tl.float32)
    for start in tl.static_range(0, d_in, block):
        of_expert = each[:, None, None] * d_in + (start + column)[None, None, :]
        inside = (start + column < d_in)[None, None, :] & (each < experts)[:, None, None]
        at = weight + line[:, :, None] * d_in + (start + column)[None, None, :]
        weights = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + of_expert, mask=inside, other=0.0).to(tl.float32)
        products = tl.reshape(weights * values, (expert_block, rows, block // summed, summed))
        sums = tl.sum(products, 3)
        if wide:
            first = start + tl.arange(0, block // summed) * summed
            place = (line // high)[:, :, None] * tl.cdiv(d_in, wide) + (first // wide)[
                None, None, :
            ]
            sums *= tl.load(scales + place, mask=(first < d_in)[None, None, :], other=0.0)
        total += sums
    out = tl.sum(total, 2)  # [experts, rows]
    if scales is not None and wide == 0:
        out *= tl.load(scales + line)
    out = out.to(y.dtype.element_ty).to(tl.float32)
    if biases is not None:
        out += tl.load(biases + line).to(tl.float32)
    out *= share[:, None]
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    tl.store(y + place, tl.sum(out, 0).to(y.dtype.element_ty), mask=place < d_out)
