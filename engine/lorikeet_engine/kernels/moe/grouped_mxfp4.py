"""Products of rows sorted by expert with weights in MXFP4, in Triton.

Tiles are cut as in `grouped`. As in `grouped_fp8`, an expert's outputs are the rows of a tensor
core's product, and its tokens the columns. Weights are decoded in registers, from which the tensor
cores read them. A group of inputs is four products, one for each of its blocks: all weights of one
output then have one scale. No weight is ever rounded.

To tune this kernel, change only TILES.
"""

import math

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.moe.grouped import TileConfig, tile_at
from lorikeet_engine.kernels.moe.mxfp4 import GROUP, Mxfp4Experts
from lorikeet_engine.kernels.routed_rows import RoutedRows

TILES = (
    (12, TileConfig(rows=16, outputs=128, inputs=GROUP, warps=4, stages=4)),
    (24, TileConfig(rows=32, outputs=128, inputs=GROUP, warps=4, stages=4)),
    (48, TileConfig(rows=64, outputs=128, inputs=GROUP, warps=4, stages=4)),
    (math.inf, TileConfig(rows=128, outputs=128, inputs=GROUP, warps=8, stages=2)),
)
"""Pairs (upper bound of an expert's average number of rows, launch parameters up to this bound).

The fastest of four or five on an H200 for 4, 32 and 256 rows of gpt-oss-20b; others are not tuned.
"""
_CODES = tl.constexpr(0x81C0)  # bits of a code in a word, once it is shifted
# Decodes two words: mxfp4.BITS in Python. Each operation handles two codes; a product with −0 as
# addend is exact, and is an instruction on Ampere too.
_DECODE = tl.constexpr("""
{
    .reg .b32 code, more, zero;
    mov.b32 zero, 0x80008000;
    and.b32 code, $4, 0x81C081C0;
    fma.rn.bf16x2 $0, code, $5, zero;
    shl.b32 code, $4, 3;
    and.b32 code, code, 0x81C081C0;
    fma.rn.bf16x2 $1, code, $7, zero;
    shl.b32 code, $4, 6;
    and.b32 code, code, 0x81C081C0;
    fma.rn.bf16x2 $2, code, $9, zero;
    shl.b32 code, $4, 1;
    and.b32 code, code, 0x80008000;
    shr.b32 more, $4, 5;
    and.b32 more, more, 0x01000100;
    or.b32 code, code, more;
    shr.b32 more, $4, 4;
    and.b32 more, more, 0x00C000C0;
    or.b32 code, code, more;
    fma.rn.bf16x2 $3, code, $11, zero;
}
""")


def tile_config(rows: int, experts: int) -> TileConfig:
    """Return the launch parameters for a layer's expert products.

    rows: number of rows of all experts together.
    experts: number of experts.
    """
    return next(config for most, config in TILES if rows <= most * experts)


def products(
    x: torch.Tensor,
    weight: Mxfp4Experts,
    routed: RoutedRows,
    config: TileConfig | None = None,
    *,
    gathered: bool = False,
) -> torch.Tensor:
    """Compute each routed row's product with its expert's weight: see kernels.moe.expert_products.

    x [rows, d_in]; if gathered [tokens, d_in], and each row reads x of its token
    config: launch parameters; None: tile_config's, or in float32 the first of TILES
    """
    experts, d_out, d_in = weight.shape
    rows = len(routed.pairs)
    wide = decodes_in_float32(x)
    # more sums of float32 than those of the first do not fit a program's registers
    c = config or (TILES[0][1] if wide else tile_config(rows, experts))
    tiles = rows // c.rows + min(rows, experts)
    y = x.new_empty((rows, d_out))
    _products_mxfp4[(tiles, triton.cdiv(d_out, c.outputs))](
        x, weight.words, weight.scales, routed.pairs, routed.starts, y,
        experts, d_out, d_in, routed.per_token, gathered, wide,
        triton.next_power_of_2(experts), c.rows, c.outputs, c.stages,
        num_warps=c.warps,
    )  # fmt: skip
    return y


def decodes_in_float32(x: torch.Tensor) -> bool:
    """Return whether MXFP4 weights are decoded to float32, not bfloat16, for products with x.

    This is so if x is not bfloat16, or on the CPU, where Triton's interpreter runs the kernel.
    """
    return x.dtype is not torch.bfloat16 or x.device.type == "cpu"


@triton.jit  # type: ignore[untyped-decorator]
def _products_mxfp4(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    pairs: tl.tensor,
    starts: tl.tensor,
    y: tl.tensor,
    experts: tl.constexpr,
    d_out: tl.constexpr,
    d_in: tl.constexpr,
    per_token: tl.constexpr,
    gathered: tl.constexpr,
    upcast: tl.constexpr,
    expert_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Compute one tile of expert products: some outputs of some rows of one expert.

    Programs beyond the last tile do nothing.

    words, scales: codes and scales of the weight (Mxfp4Experts).
    upcast: whether to multiply in float32.
    All other operands: see grouped._products.
    """
    expert, first_row, end = tile_at(tl.program_id(0), starts, experts, expert_block, block_rows)
    if expert >= experts:
        return
    row = first_row + tl.arange(0, block_rows)
    output = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    # Rows and outputs beyond the last repeat the last; they are not stored.
    token = tl.minimum(row, end - 1)
    if gathered:
        token = tl.load(pairs + token) // per_token
    at_x = x + token.to(tl.int64) * d_in
    line = tl.minimum(output, d_out - 1)
    sums = multiplied(
        at_x, None, words, scales, expert, line, 0, tl.cdiv(d_in, 128), d_out, d_in, upcast,
        block_rows, block_outputs, stages,
    )  # fmt: skip
    at_y = y + row[None, :].to(tl.int64) * d_out + output[:, None]
    mask = (output < d_out)[:, None] & (row < end)[None, :]
    tl.store(at_y, sums.to(y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def multiplied(
    at_x: tl.tensor,
    real: tl.tensor,
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
    """Return the products of some rows and some outputs of one expert, in float32.

    at_x [rows]: pointers to the rows.
    real [rows]: mask of the rows to read, others are 0; None: all.
    words, scales: codes and scales of the weights (Mxfp4Experts).
    line [outputs]: indices of the outputs.
    upcast: whether to multiply in float32.
    begin, end: first group of 128 inputs to multiply, and the group after the last.
    stages: number of groups that are loaded at the same time.
    → [outputs, rows]
    """
    first = (expert.to(tl.int64) * tl.cdiv(d_in, 128) + begin) * d_out
    element = tl.arange(0, 32)
    at_words = words + first * 32 + (line[:, None] * 32 + element[None, :])
    at_scales = scales + first + line
    at_x = at_x[:, None] + element[None, :]
    sums = tl.zeros((block_outputs, block_rows), tl.float32)
    # Stages of the loop, not of the launch: the latter prefetch only the operands of tl.dot.
    for group in tl.range(begin, end, num_stages=stages):
        packed, exponents = tl.load(at_words), tl.load(at_scales)
        w_0, w_1, w_2, w_3 = decoded(packed, exponents, upcast)
        sums = _add_block(sums, w_0, at_x, real, group * 128, d_in, upcast)
        sums = _add_block(sums, w_1, at_x, real, group * 128 + 32, d_in, upcast)
        sums = _add_block(sums, w_2, at_x, real, group * 128 + 64, d_in, upcast)
        sums = _add_block(sums, w_3, at_x, real, group * 128 + 96, d_in, upcast)
        at_words += d_out * 32
        at_scales += d_out
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _add_block(
    sums: tl.tensor,
    weights: tl.tensor,
    at_x: tl.tensor,
    real: tl.tensor,
    first: tl.tensor,
    d_in: tl.constexpr,
    upcast: tl.constexpr,
) -> tl.tensor:
    """Add the products of one block of inputs to the sums.

    weights [outputs, 32]: weights of the block of 32 inputs.
    at_x [rows, 32]: pointers to the rows' first 32 inputs.
    real: mask of the rows to read; None: all.
    first: the block's first input.
    """
    # Blocks beyond the last read the last inputs; their weights are 0.
    at = at_x + tl.multiple_of(tl.minimum(first, d_in - 32), 32)
    values = tl.load(at) if real is None else tl.load(at, mask=real[:, None], other=0.0)
    if upcast:
        values = values.to(tl.float32)
    return tl.dot(weights, values.T, sums, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def decoded(
    words: tl.tensor, exponents: tl.tensor, upcast: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the weights of the four blocks of a group, each [outputs, 32].

    words [outputs, 32], exponents [outputs]: codes and scales of a group (Mxfp4Experts).
    upcast: whether to return float32, not bfloat16; without inline PTX, which Triton's interpreter
        lacks.
    """
    if upcast:
        bits = words.to(tl.int32)
        fourth = (bits << 1 & 0x8000) | (bits >> 5 & 0x0100) | (bits >> 4 & 0x00C0)
        w_0 = _scaled(bits & _CODES, exponents)
        w_1 = _scaled(bits << 3 & _CODES, exponents >> 8)
        w_2 = _scaled(bits << 6 & _CODES, exponents >> 16)
        w_3 = _scaled(fourth, exponents >> 24)
    else:
        w_0, w_1, w_2, w_3 = tl.inline_asm_elementwise(
            _DECODE,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [words, _pair(exponents), _pair(exponents >> 8), _pair(exponents >> 16),
             _pair(exponents >> 24)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )  # fmt: skip
    return w_0, w_1, w_2, w_3


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(bits: tl.tensor, exponents: tl.tensor) -> tl.tensor:
    """Return numbers of bfloat16, given by their bits, times their rows' scales, in float32.

    exponents [rows]: exponent bits of each row's scale, in the lowest byte.
    """
    numbers = (bits << 16).to(tl.float32, bitcast=True)
    return numbers * ((exponents & 255) << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _pair(exponents: tl.tensor) -> tl.tensor:
    """Return the scales of rows as two equal numbers of bfloat16 in 32 bits: [rows, 1].

    exponents [rows]: exponent bits of each row's scale, in the lowest byte.
    """
    return ((exponents & 255) * 0x00800080)[:, None]
