"""FP8 products of rows sorted by expert, in Triton, for decodes and prefills.

Tiles are cut as in `grouped`. The tensor cores' products have at least 64 rows, while 16 columns
are enough: here an expert's outputs are the rows, and its tokens the columns. A tile's sums stay in
the tensor cores until its end; kernels/fp8/fused.linear gives the loss of precision. If a weight's
blocks have scales, only the sums over one block's columns stay there, and scales are prefetched as
weights are.

To tune this kernel, change only TILES.
"""

import math

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.fp8 import Fp8Rows, kernel_arguments
from lorikeet_engine.kernels.moe.grouped import TileConfig, tile_at
from lorikeet_engine.kernels.routed_rows import RoutedRows

TILES = (
    (8, TileConfig(rows=16, outputs=64, inputs=256, warps=4, stages=4)),
    (32, TileConfig(rows=32, outputs=64, inputs=128, warps=4, stages=4)),
    (96, TileConfig(rows=64, outputs=128, inputs=128, warps=4, stages=3)),
    (math.inf, TileConfig(rows=128, outputs=128, inputs=128, warps=8, stages=3)),
)
"""Pairs (upper bound of an expert's average number of rows, launch parameters up to this bound).

Not yet tuned on a GPU.
"""
_LEAST_INPUTS = 32  # step of the tensor cores' products


def tile_config(rows: int, experts: int) -> TileConfig:
    """Return the launch parameters for a layer's expert products.

    rows: number of rows of all experts together.
    experts: number of experts.
    """
    return next(config for most, config in TILES if rows <= most * experts)


def products(
    x: Fp8Rows,
    weight: Fp8Rows,
    routed: RoutedRows,
    dtype: torch.dtype,
    config: TileConfig | None = None,
    *,
    gathered: bool = False,
) -> torch.Tensor:
    """Compute each routed row's product with its expert's weight: see kernels.moe.expert_products.

    x: the rows, or if gathered the tokens, rounded to FP8
    weight: rows [experts, d_out, d_in]
    config: launch parameters; None: tile_config's
    → [rows, d_out] of dtype
    """
    matrices, scales, high, wide = kernel_arguments(weight)
    (experts, d_out, d_in), device = matrices.shape, x.rows.device
    rows = len(routed.pairs)
    c = config or tile_config(rows, experts)
    tiles = rows // c.rows + min(rows, experts)
    y = torch.empty((rows, d_out), dtype=dtype, device=device)
    columns = min(c.inputs, max(_LEAST_INPUTS, triton.next_power_of_2(d_in)))
    inputs = math.gcd(columns, wide)  # with one scale; `stages` keeps the bytes in flight
    stages = min(c.stages * columns // inputs, triton.cdiv(d_in, inputs) + 1)
    _products_fp8[(tiles, triton.cdiv(d_out, c.outputs))](
        x.rows, x.scales, matrices, scales, routed.pairs, routed.starts, y,
        experts, d_out, d_in, high, wide, routed.per_token, gathered,
        device.type == "cpu",  # Triton's interpreter, which multiplies raw bits of FP8
        triton.next_power_of_2(experts), c.rows, c.outputs, inputs, stages,
        num_warps=c.warps,
    )  # fmt: skip
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _products_fp8(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    w_scales: tl.tensor,
    pairs: tl.tensor,
    starts: tl.tensor,
    y: tl.tensor,
    experts: tl.constexpr,
    d_out: tl.constexpr,
    d_in: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    per_token: tl.constexpr,
    gathered: tl.constexpr,
    upcast: tl.constexpr,
    expert_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Compute one tile of FP8 expert products: some outputs of some rows of one expert.

    Programs beyond the last tile do nothing.

    x_scales, w_scales: scales of the inputs and of the weight.
    high, wide: height and width of the weight's blocks that have scales; wide 0: rows have scales.
    upcast: whether to multiply in float32, as Triton's interpreter must.
    All other operands: see grouped._products.
    """
    expert, first_row, end = tile_at(tl.program_id(0), starts, experts, expert_block, block_rows)
    if expert >= experts:
        return
    row = first_row + tl.arange(0, block_rows)
    output = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    element = tl.arange(0, block_inputs)
    # Rows and outputs beyond the last repeat the last; they are not stored.
    token = tl.minimum(row, end - 1)
    if gathered:
        token = tl.load(pairs + token) // per_token
    line = expert.to(tl.int64) * d_out + tl.minimum(output, d_out - 1)
    at_x = x + token[:, None].to(tl.int64) * d_in + element[None, :]
    at_weight = weight + line[:, None] * d_in + element[None, :]
    sums = tl.zeros((block_outputs, block_rows), tl.float32)
    # Stages of the loop, not of the launch: the latter prefetch only the operands of tl.dot.
    for first in tl.range(0, d_in, block_inputs, num_stages=stages):
        if d_in % block_inputs == 0:
            weights, values = tl.load(at_weight + first), tl.load(at_x + first)
        else:
            inside = (first + element < d_in)[None, :]
            weights = tl.load(at_weight + first, mask=inside, other=0.0)
            values = tl.load(at_x + first, mask=inside, other=0.0)
        if upcast:
            weights, values = weights.to(tl.float32), values.to(tl.float32)
        if wide:
            scales = tl.load(w_scales + line // high * tl.cdiv(d_in, wide) + first // wide)
            sums += tl.dot(weights, values.T) * scales[:, None]
        else:
            sums = tl.dot(weights, values.T, sums)
    if not wide:
        sums *= tl.load(w_scales + line)[:, None]
    sums *= tl.load(x_scales + token)[None, :]
    at_y = y + row[None, :].to(tl.int64) * d_out + output[:, None]
    mask = (output < d_out)[:, None] & (row < end)[None, :]
    tl.store(at_y, sums.to(y.dtype.element_ty), mask=mask)
