"""Experts in MXFP4 of a single token in Triton: two launches after the routing.

A program multiplies some outputs of one expert, as in `grouped_mxfp4`, by the only real row of its
tile. To tune these kernels, change only GATE_UP and DOWN.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.moe import ClampedBiases
from lorikeet_engine.kernels.moe.clamp import clamped
from lorikeet_engine.kernels.moe.grouped import TileConfig
from lorikeet_engine.kernels.moe.grouped_mxfp4 import decodes_in_float32, multiplied, stages_for
from lorikeet_engine.kernels.moe.mxfp4 import GROUP, Mxfp4Experts
from lorikeet_engine.kernels.moe.one_token import bias_arguments
from lorikeet_engine.kernels.split_k import arrived

GATE_UP = TileConfig(rows=16, outputs=64, inputs=GROUP, warps=4, stages=5)
DOWN = TileConfig(rows=16, outputs=64, inputs=GROUP, warps=4, stages=6)
"""Launch parameters of gate_up's and of down's products. Not yet tuned on a GPU."""


def gate_up_of(
    x: torch.Tensor,
    weight: Mxfp4Experts,
    chosen: torch.Tensor,
    biases: ClampedBiases,
    config: TileConfig = GATE_UP,
) -> torch.Tensor:
    """Compute clamped_swiglu of x·weight[e]ᵀ for each expert e chosen for a single token.

    x, chosen: see one_token.gate_up_of
    → [per_token, d_out / 2]
    """
    _, d_out, d_in = weight.shape
    y = x.new_empty((chosen.shape[1], d_out // 2))
    _gate_up_mxfp4[(triton.cdiv(d_out, config.outputs), len(y))](
        x, weight.words, weight.scales, chosen, y, *bias_arguments(biases), d_out, d_in,
        decodes_in_float32(x), config.rows, config.outputs, stages_for(x, config),
        num_warps=config.warps,
    )  # fmt: skip
    return y


def down_of(
    x: torch.Tensor,
    weight: Mxfp4Experts,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    biases: torch.Tensor | None,
    config: TileConfig = DOWN,
) -> torch.Tensor:
    """Compute Σ_j shares[j] · (x[j]·weight[e]ᵀ + biases[e]) over the experts e = chosen[j].

    x, chosen, shares, biases: see one_token.down_of
    → [1, d_out]

    Each product is rounded before the sum, as if products and sum had a launch each.
    """
    _, d_out, d_in = weight.shape
    y, products = x.new_empty((1, d_out)), x.new_empty((len(x), d_out))
    _down_mxfp4[(triton.cdiv(d_out, config.outputs), len(x))](
        x, weight.words, weight.scales, chosen, shares, biases, products, arrived(x.device), y,
        d_out, d_in, decodes_in_float32(x), len(x), config.rows, config.outputs,
        stages_for(x, config),
        num_warps=config.warps,
    )  # fmt: skip
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _of_one(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    expert: tl.tensor,
    line: tl.tensor,
    d_out: tl.constexpr,
    d_in: tl.constexpr,
    upcast: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    stages: tl.constexpr,
) -> tl.tensor:
    """Return the products of one row x [d_in] and some outputs of an expert, in float32: [outputs].

    line: the outputs. Other operands: see grouped_mxfp4.multiplied.
    """
    row = tl.arange(0, block_rows)
    sums = multiplied(
        x + row * 0, row == 0, words, scales, expert, line, d_out, d_in, upcast,
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

    x, chosen: see gate_up_of; y: its result. words, scales: see Mxfp4Experts.
    biases, alpha, limit: see one_token.bias_arguments. upcast: see decodes_in_float32.
    """
    tile, index = tl.program_id(0), tl.program_id(1)
    place = tl.minimum(tile * block_outputs + tl.arange(0, block_outputs), d_out - 1)
    line = place // 2 + place % 2 * (d_out // 2)
    expert = tl.load(chosen + index)
    out = _of_one(
        x, words, scales, expert, line, d_out, d_in, upcast, block_rows, block_outputs, stages
    )
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
    products: tl.tensor,
    arrived: tl.tensor,
    y: tl.tensor,
    d_out: tl.constexpr,
    d_in: tl.constexpr,
    upcast: tl.constexpr,
    per_token: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Compute some outputs of one expert; the last program of a tile adds up those of all experts.

    x, chosen, shares, biases: see down_of; y: its result. words, scales: see Mxfp4Experts.
    products [per_token, d_out]: outputs of all programs. arrived: counters (split_k.arrived).
    upcast: see decodes_in_float32.
    """
    tile, index = tl.program_id(0), tl.program_id(1)
    place = tile * block_outputs + tl.arange(0, block_outputs)
    line, held = tl.minimum(place, d_out - 1), place < d_out
    out = _of_one(
        x + index * d_in, words, scales, tl.load(chosen + index), line, d_out, d_in, upcast,
        block_rows, block_outputs, stages,
    )  # fmt: skip
    tl.store(products + index * d_out + place, out.to(y.dtype.element_ty), mask=held)
    tl.debug_barrier()  # all of this program's outputs are stored before it counts itself done
    if tl.atomic_add(arrived + tile, 1) < per_token - 1:
        return
    total = tl.zeros((block_outputs,), tl.float32)
    for j in tl.static_range(per_token):
        # .cg: from the L2 cache, which holds other programs' outputs
        out = tl.load(products + j * d_out + line, cache_modifier=".cg").to(tl.float32)
        if biases is not None:
            out += tl.load(biases + tl.load(chosen + j).to(tl.int64) * d_out + line).to(tl.float32)
        total += tl.load(shares + j) * out
    tl.store(arrived + tile, 0)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=held)
