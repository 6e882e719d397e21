"""Products with weights of 4 bits on CUDA, in Triton.

A product of few tokens is bound by reading its weight, so each byte is read once and decoded in
registers: weight outputs are the rows of a tensor core's product and tokens its columns, as in
kernels/fp8/few_tokens.py. The low and the high halves of the bytes are two products over two sets
of columns of x, so that decoding moves nothing between threads. Integers q − z are exact in 16
bits, and their scale multiplies the sums of a group: no value of the weight is ever rounded.

A product of many tokens is bound by the tensor cores, and decoding would be repeated for each 128
tokens. There some outputs of the weight at a time are decoded to x's dtype, in a buffer that the
GPU's cache holds, and cuBLAS multiplies.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.split_k import ProductConfig, arrived
from lorikeet_engine.kernels.w4a16 import MIDDLE, PackedWeight

DECODED_FROM = 1024
"""Number of tokens from which the weight is decoded first."""
_DECODED_BYTES = 32 << 20  # of the decoded outputs at a time: a Hopper GPU's cache has 50 MB
_BLOCK_TOKENS = 128  # at most, of one program
_PROGRAMS = 264  # two for each multiprocessor of an H200
_MOST_SPLIT = 8
_FEW_TOKENS = 64
_DECODED_TILE = 64, 64  # outputs and bytes
# A number of 16 bits whose last four bits are the integer added to `_OFFSETS`, by dtype.
_ONES = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
_OFFSETS = {torch.bfloat16: 128, torch.float16: 1024}
_TRITON = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute kernels.w4a16.linear.

    From DECODED_FROM tokens on, values of the weight are rounded to x's dtype.
    """
    if len(x) >= DECODED_FROM:
        return multiply_decoded(x, weight, bias)
    return multiply(x, weight, bias, product_config(weight, len(x)))


def product_config(weight: PackedWeight, tokens: int) -> ProductConfig:
    """Return launch parameters for a weight [d_out, d_in] and a number of tokens."""
    if tokens > _FEW_TOKENS:
        return ProductConfig(block_out=128, block_in=128, split=1, warps=8, stages=3)
    tiles, split = triton.cdiv(weight.d_out, 64), 1
    while split < _MOST_SPLIT and tiles * split * 2 <= _PROGRAMS:
        split *= 2
    return ProductConfig(block_out=64, block_in=128, split=split, warps=4, stages=4)


def multiply(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, config: ProductConfig
) -> torch.Tensor:
    """Compute x·Wᵀ + b in one launch.

    x [tokens, d_in]: at most 128 tokens if config.split > 1
    weight: W [d_out, d_in]
    bias: b [d_out]
    config: launch parameters; block_in is lowered to a divisor of the weight's groups
    → [tokens, d_out] like x
    """
    assert x.stride(1) == 1
    count, d_out, device = len(x), weight.d_out, x.device
    y = torch.empty((count, d_out), dtype=x.dtype, device=device)
    block_in = gcd(config.block_in, weight.group)
    stages = config.stages * config.block_in // block_in  # the same bytes in flight
    block_tokens = min(_BLOCK_TOKENS, max(16, triton.next_power_of_2(count)))
    tiles = triton.cdiv(d_out, config.block_out)
    parts = counters = None
    if config.split > 1:
        size = (tiles, config.split, config.block_out, block_tokens)
        parts = torch.empty(size, dtype=torch.float32, device=device)
        counters = arrived(device)
    # programs that run at the same time read the same weights: token blocks vary fastest
    _multiply[(triton.cdiv(count, block_tokens), tiles, config.split)](
        x, weight.codes, weight.scales, weight.zeros, weight.order, weight.levels, bias, y,
        parts, counters,
        count, x.stride(0), d_out, weight.d_in // block_in, weight.group // block_in,
        device.type == "cpu",  # Triton's interpreter, which multiplies 16 bits as integers
        _TRITON[weight.rounded], MIDDLE, _ONES.get(x.dtype, 0), _OFFSETS.get(x.dtype, 0),
        block_tokens, config.block_out, block_in, config.split, stages,
        num_warps=config.warps,
    )  # fmt: skip
    return y


def multiply_decoded(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute x·Wᵀ + b, with some outputs of the weight at a time decoded to x's dtype."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    y = x.new_empty((len(x), weight.d_out))
    most = max(1, _DECODED_BYTES // (weight.d_in * x.itemsize))
    buffer = x.new_empty((min(most, weight.d_out), weight.d_in))
    for first in range(0, weight.d_out, most):
        of_outputs = y[:, first : first + most]
        rows = buffer[: of_outputs.shape[1]]
        decode(weight, first, rows)
        torch.mm(x, rows.t(), out=of_outputs)
    return y if bias is None else y.add_(bias)


def decode(weight: PackedWeight, first: int, out: torch.Tensor) -> None:
    """Fill `out` with values of outputs from `first` on, in the order of the weight's columns.

    out [outputs, d_in]: contiguous; values are rounded to its dtype.
    """
    block_out, block = _DECODED_TILE
    block = gcd(block, weight.group // 2)
    _decode_weight[(weight.d_in // (2 * block), triton.cdiv(len(out), block_out))](
        weight.codes, weight.scales, weight.zeros, weight.levels, out,
        first, len(out), weight.d_out, weight.d_in, weight.group,
        _TRITON[weight.rounded], MIDDLE, block_out, block,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _of_group(
    scales: tl.tensor, zeros: tl.tensor, place: tl.tensor, middle: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load the scales and the zero points of some outputs in a group, in float32.

    place: indices in scales and zeros. middle: zero point if none are stored.
    """
    scale = tl.load(scales + place).to(tl.float32)
    zero = tl.zeros_like(scale) + middle if zeros is None else tl.load(zeros + place).to(tl.float32)
    return scale, zero


@triton.jit  # type: ignore[untyped-decorator]
def _integers(
    halves: tl.tensor,
    zero: tl.tensor,
    ones: tl.constexpr,
    offset: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return halves − zero in a float dtype.

    With 16 bits, the half byte becomes the last bits of the number offset + half, and the exact
    difference (offset + half) − (offset + zero) is taken: two operations where a cast takes more.

    halves: half bytes, uint8 [rows, columns]. zero [rows]: zero points in float32.
    ones, offset: see _ONES and _OFFSETS; 0 for float32.
    """
    if ones:
        numbers = (halves.to(tl.uint16) | ones).to(dtype, bitcast=True)
        out = numbers - (zero + offset).to(dtype)[:, None]
    else:
        out = halves.to(tl.float32) - zero[:, None]
    return out


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _multiply(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    order: tl.tensor,
    levels: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    parts: tl.tensor,
    arrived: tl.tensor,
    count: tl.tensor,
    x_stride: tl.tensor,
    d_out: tl.tensor,
    steps: tl.tensor,
    of_group: tl.tensor,
    upcast: tl.constexpr,
    rounded: tl.constexpr,
    middle: tl.constexpr,
    ones: tl.constexpr,
    offset: tl.constexpr,
    block_tokens: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    split: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Compute an output tile, some outputs of some tokens, or its partial sums over some inputs.

    Operands: see `multiply` and PackedWeight; those that the weight lacks are None.
    parts: partial sums of all programs. arrived: counters (split_k.arrived). Both None without
        split-K.
    count: number of tokens. x_stride: elements of x from token to token.
    steps: number of blocks of block_in inputs. of_group: number of these blocks in a group.
    upcast: whether to multiply in float32, as Triton's interpreter must.
    rounded: dtype that NF4's values are rounded to. middle: zero point if none are stored.
    ones, offset: see _integers.
    block_tokens, block_out: size of an output tile. block_in, split, stages: see ProductConfig.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    tile, part = tl.program_id(1), tl.program_id(2)
    m, byte = tl.arange(0, block_out), tl.arange(0, block_in // 2)
    n = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    row = tile * block_out + m
    # Rows and tokens beyond the last repeat the last; they are not stored.
    inside = tl.minimum(row, d_out - 1)
    low = byte // 16 * 32 + byte % 16
    line = inside[:, None] * 16 + (byte // 16)[None, :] * (d_out * 16) + (byte % 16)[None, :]
    x_at = x + tl.minimum(n, count - 1)[:, None].to(tl.int64) * x_stride
    sums = tl.zeros((block_out, block_tokens), tl.float32)
    groups_at = inside * (steps // of_group)
    for step in tl.range(part * steps // split, (part + 1) * steps // split, num_stages=stages):
        # evict_first: the next step's weights will not be found in the cache anyway
        at = codes + step * (block_in // 32 * 16) * d_out
        both = tl.load(at + line, eviction_policy="evict_first")
        scale, zero = _of_group(scales, zeros, groups_at + step // of_group, middle)
        first = step * block_in + low
        second = first + 16
        if order is not None:
            first, second = tl.load(order + first), tl.load(order + second)
        x_low, x_high = tl.load(x_at + first[None, :]), tl.load(x_at + second[None, :])
        if levels is None:
            w_low = _integers(both & 15, zero, ones, offset, dtype)
            w_high = _integers(both >> 4, zero, ones, offset, dtype)
        else:
            w_low = (tl.load(levels + (both & 15)) * scale[:, None]).to(rounded).to(dtype)
            w_high = (tl.load(levels + (both >> 4)) * scale[:, None]).to(rounded).to(dtype)
        if upcast:
            w_low, w_high = w_low.to(tl.float32), w_high.to(tl.float32)
            x_low, x_high = x_low.to(tl.float32), x_high.to(tl.float32)
        product = tl.dot(w_low, x_low.T, input_precision="ieee")
        product = tl.dot(w_high, x_high.T, product, input_precision="ieee")
        sums += product * scale[:, None] if levels is None else product
    if split > 1:
        cell = m[:, None] * block_tokens + n[None, :]
        size: tl.constexpr = block_out * block_tokens
        of_tile = parts + tile * split * size + cell
        tl.store(of_tile + part * size, sums)
        tl.debug_barrier()  # all of this program's sums are stored before it counts itself done
        if tl.atomic_add(arrived + tile, 1) < split - 1:
            return
        sums = tl.zeros((block_out, block_tokens), tl.float32)
        for other in tl.static_range(split):
            # .cg: from the L2 cache, which holds other programs' sums
            sums += tl.load(of_tile + other * size, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    real = row < d_out
    if bias is not None:
        sums += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)[:, None]
    out = y + n[None, :].to(tl.int64) * d_out + row[:, None]
    tl.store(out, sums.to(dtype), mask=real[:, None] & (n < count)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _decode_weight(
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    levels: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    outputs: tl.tensor,
    d_out: tl.tensor,
    d_in: tl.tensor,
    group: tl.tensor,
    rounded: tl.constexpr,
    middle: tl.constexpr,
    block_out: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Decode a tile of a weight: `block_out` outputs of 2 · `block` inputs of one group.

    Operands: see `decode` and PackedWeight. outputs: number of outputs to decode.
    """
    column = tl.program_id(0) * 2 * block
    row = tl.program_id(1) * block_out + tl.arange(0, block_out)
    byte = tl.arange(0, block)
    inside = (row < outputs)[:, None]
    of_weight = first + tl.minimum(row, outputs - 1)
    span = (column // 32 + byte // 16)[None, :].to(tl.int64)
    both = tl.load(codes + (span * d_out + of_weight[:, None]) * 16 + (byte % 16)[None, :])
    scale, zero = _of_group(scales, zeros, of_weight * (d_in // group) + column // group, middle)
    if levels is None:
        low = ((both & 15).to(tl.float32) - zero[:, None]) * scale[:, None]
        high = ((both >> 4).to(tl.float32) - zero[:, None]) * scale[:, None]
    else:
        low = (tl.load(levels + (both & 15)) * scale[:, None]).to(rounded)
        high = (tl.load(levels + (both >> 4)) * scale[:, None]).to(rounded)
    at = out + row[:, None].to(tl.int64) * d_in + (column + byte // 16 * 32 + byte % 16)[None, :]
    tl.store(at, low.to(out.dtype.element_ty), mask=inside)
    tl.store(at + 16, high.to(out.dtype.element_ty), mask=inside)
