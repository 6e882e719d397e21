"""Experts in MXFP4 of a single token in Triton: two launches after the routing.

A program multiplies some outputs of one expert, as in `grouped_mxfp4`, by the only real row of its
tile. To tune these kernels, change only GATE_UP and DOWN.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.moe import ClampedBiases
from lorikeet_engine.kernels.moe.clamp import clamped
from lorikeet_engine.kernels.moe.grouped_mxfp4 import decodes_in_float32, multiplied
from lorikeet_engine.kernels.moe.mxfp4 import GROUP, Mxfp4Experts
from lorikeet_engine.kernels.moe.one_token import bias_arguments
from lorikeet_engine.kernels.split_k import ProductConfig, arrived

GATE_UP = ProductConfig(block_out=64, block_in=GROUP, split=1, warps=4, stages=4)
DOWN = ProductConfig(block_out=128, block_in=GROUP, split=4, warps=4, stages=4)
"""Launch parameters of gate_up's products, which are not split, and of down's.

The fastest of four on an H200 for gpt-oss-20b.
"""
_ROWS = 16  # of a tile: the fewest that tensor cores multiply


def gate_up_of(
    x: torch.Tensor,
    weight: Mxfp4Experts,
    chosen: torch.Tensor,
    biases: ClampedBiases,
) -> torch.Tensor:
    """Compute clamped_swiglu of x·weight[e]ᵀ for each expert e chosen for a single token.

    x [1, d_in]
    weight [experts, d_out, d_in]
    chosen [1, per_token] int32: the token's experts
    biases: biases of gate_up, and constants of clamped_swiglu
    → [per_token, d_out / 2]
    """
    _, d_out, d_in = weight.shape
    y = x.new_empty((chosen.shape[1], d_out // 2))
    _gate_up_mxfp4[(triton.cdiv(d_out, GATE_UP.block_out), len(y))](
        x, weight.words, weight.scales, chosen, y, *bias_arguments(biases), d_out, d_in,
        decodes_in_float32(x), _ROWS, GATE_UP.block_out, GATE_UP.stages,
        num_warps=GATE_UP.warps,
    )  # fmt: skip
    return y


def down_of(
    x: torch.Tensor,
    weight: Mxfp4Experts,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    biases: torch.Tensor | None,
) -> torch.Tensor:
    """Compute Σ_j shares[j] · (x[j]·weight[e]ᵀ + biases[e]) over the experts e = chosen[j].

    x [per_token, d_in]: each expert's input
    chosen [1, per_token] int32: the token's experts
    shares [1, per_token] float32: weights of the experts
    biases [experts, d_out]: added to the products; None: no biases
    → [1, d_out]

    Each product is rounded before the sum, as if products and sum had a launch each.
    """
    _, d_out, d_in = weight.shape
    y, parts = x.new_empty((1, d_out)), shares.new_empty((len(x), DOWN.split, d_out))
    _down_mxfp4[(triton.cdiv(d_out, DOWN.block_out), len(x), DOWN.split)](
        x, weight.words, weight.scales, chosen, shares, biases, parts, arrived(x.device), y,
        d_out, d_in, decodes_in_float32(x), len(x), DOWN.split, _ROWS, DOWN.block_out,
        DOWN.stages,
        num_warps=DOWN.warps,
    )  # fmt: skip
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _of_one(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    expert: tl.tensor,
    line: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    d_out: tl.constexpr,
    d_in: tl.constexpr,
    upcast: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    stages: tl.constexpr,
) -> tl.tensor:
    """Return the products of one row x [d_in] and some outputs of an expert, in float32: [outputs].

    words, scales: codes and scales of the weights (Mxfp4Experts).
    line [outputs]: indices of the outputs.
    begin, end: first group of 128 inputs to multiply, and the group after the last.
    upcast: whether to multiply in float32. block_rows: rows of the tile, which x is padded to.
    stages: number of groups that are loaded at the same time.
    """
    row = tl.arange(0, block_rows)
    sums = multiplied(
        x + row * 0, row == 0, words, scales, expert, line, begin, end, d_out, d_in, upcast,
        block_rows, block_outputs, stages,
    )  # fmt: skip
    return tl.sum(sums, 1)  # the other rows are 0


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_mxfp4(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    chosen: tl.tensor,
    y: tl.tensor,
    biases: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    d_out: tl.constexpr,
    d_in: tl.constexpr,
    upcast: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Compute some activations of one expert: half of a tile's outputs gate the other half.

    x, chosen: input, and the token's experts. y: result.
    words, scales: codes and scales of the weight (Mxfp4Experts).
    biases, alpha, limit: biases of gate_up and constants of clamped_swiglu (Clamp).
    upcast: whether to multiply in float32.
    """
    tile, index = tl.program_id(0), tl.program_id(1)
    place = tl.minimum(tile * block_outputs + tl.arange(0, block_outputs), d_out - 1)
    line = place // 2 + place % 2 * (d_out // 2)
    expert = tl.load(chosen + index)
    out = _of_one(
        x, words, scales, expert, line, 0, tl.cdiv(d_in, 128), d_out, d_in, upcast,
        block_rows, block_outputs, stages,
    )  # fmt: skip
    out = out.to(y.dtype.element_ty).to(tl.float32)
    out += tl.load(biases + expert.to(tl.int64) * d_out + line).to(tl.float32)
    gates, values = tl.split(tl.reshape(out, (block_outputs // 2, 2)))
    out = clamped(gates, values, alpha, limit)
    place = tile * (block_outputs // 2) + tl.arange(0, block_outputs // 2)
    mask = place < d_out // 2
    tl.store(y + index * (d_out // 2) + place, out.to(y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _down_mxfp4(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    chosen: tl.tensor,
    shares: tl.tensor,
    biases: tl.tensor,
    parts: tl.tensor,
    arrived: tl.tensor,
    y: tl.tensor,
    d_out: tl.constexpr,
    d_in: tl.constexpr,
    upcast: tl.constexpr,
    per_token: tl.constexpr,
    split: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Compute some outputs of one expert, or their partial sums over some inputs.

    The last program of a tile adds up those of all experts.

    x: input of each of the token's experts. y: result.
    chosen, shares: the token's experts, and their weights in the sum.
    biases: biases of all experts, added to their outputs; None: no biases.
    words, scales: codes and scales of the weight (Mxfp4Experts).
    parts [per_token, split, d_out]: partial sums of all programs.
    split: number of programs that share the inputs.
    arrived: counters of finished programs, one for each tile of outputs.
    upcast: whether to multiply in float32.
    """
    tile, index, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups: tl.constexpr = tl.cdiv(d_in, 128)
    place = tile * block_outputs + tl.arange(0, block_outputs)
    line, held = tl.minimum(place, d_out - 1), place < d_out
    out = _of_one(
        x + index * d_in, words, scales, tl.load(chosen + index), line,
        part * groups // split, (part + 1) * groups // split, d_out, d_in, upcast,
        block_rows, block_outputs, stages,
    )  # fmt: skip
    tl.store(parts + (index * split + part) * d_out + place, out, mask=held)
    tl.debug_barrier()  # all of this program's sums are stored before it counts itself done
    if tl.atomic_add(arrived + tile, 1) < per_token * split - 1:
        return
    total = tl.zeros((block_outputs,), tl.float32)
    for j in tl.static_range(per_token):
        out = tl.zeros((block_outputs,), tl.float32)
        for of in tl.static_range(split):
            # .cg: from the L2 cache, which holds other programs' sums
            out += tl.load(parts + (j * split + of) * d_out + line, cache_modifier=".cg")
        out = out.to(y.dtype.element_ty).to(tl.float32)
        if biases is not None:
            out += tl.load(biases + tl.load(chosen + j).to(tl.int64) * d_out + line).to(tl.float32)
        total += tl.load(shares + j) * out
    tl.store(arrived + tile, 0)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=held)
