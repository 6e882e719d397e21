"""Products with weights of 4 bits on CUDA, in Triton.

A product of few tokens is bound by reading its weight, so each byte is read once and decoded in
registers: weight outputs are the rows of a tensor core's product and tokens its columns, as in
kernels/fp8/few_tokens.py. A register holds two elements of PackedWeight.codes, thus the codes of
eight inputs, and each two of them become numbers of 16 bits in two instructions. Integers q − z are
exact in 16 bits, and their scale multiplies the sums of a group: no value of the weight is ever
rounded.

A product of many tokens is bound by the tensor cores, and decoding would be repeated for each 128
tokens. There some outputs of the weight at a time are decoded to x's dtype, in a buffer that the
GPU's cache holds, and cuBLAS multiplies.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.split_k import ProductConfig, arrived, turned
from lorikeet_engine.kernels.w4a16 import MIDDLE, SPAN, PackedWeight

DECODED_FROM = 384
"""Number of tokens from which the weight is decoded first."""
_DECODED_BYTES = 32 << 20  # of the decoded outputs at a time: a Hopper GPU's cache has 50 MB
_BLOCK_TOKENS = 128  # at most, of one program
_SMS = 132  # multiprocessors of an H200
_MOST_SPLIT, _LEAST_SPANS = 8, 8  # of one program
_TURNED = 32
"""Most tokens of programs that begin with different inputs, see split_k.turned."""
_DECODED_OUTPUTS = 64  # of one program
# A number of 16 bits whose last four bits are the integer added to `_OFFSETS`, by dtype.
_ONES = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
_OFFSETS = {torch.bfloat16: 128, torch.float16: 1024}
# Two elements of codes share a register: 7 instructions for 8 codes.
_FOUR = """{
    .reg .b32 second, third, fourth;
    shr.u32 second, $4, 4;
    shr.u32 third, $4, 8;
    shr.u32 fourth, $4, 12;
    lop3.b32 $0, $4, 0x000f000f, ONES, 0xea;
    lop3.b32 $1, second, 0x000f000f, ONES, 0xea;
    lop3.b32 $2, third, 0x000f000f, ONES, 0xea;
    lop3.b32 $3, fourth, 0x000f000f, ONES, 0xea;
}"""
_FOUR_BFLOAT16 = tl.constexpr(_FOUR.replace("ONES", "0x43004300"))
_FOUR_FLOAT16 = tl.constexpr(_FOUR.replace("ONES", "0x64006400"))
_TRITON = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x·Wᵀ + b (kernels.w4a16.linear) on CUDA.

    From DECODED_FROM tokens on, values of the weight are rounded to x's dtype.
    """
    if len(x) >= DECODED_FROM:
        return multiply_decoded(x, weight, bias)
    return multiply(x, weight, bias, product_config(weight, len(x)))


def product_config(weight: PackedWeight, tokens: int) -> ProductConfig:
    """Return launch parameters for a weight [d_out, d_in] and a number of tokens.

    The fastest on an H200, or near to it, for the linears of Llama-3.1-8B.
    """
    block_tokens, block_out, warps, split = _block_tokens(tokens), 64, 4, 1
    if 16 < block_tokens <= 64 and weight.d_out >= 128 * _SMS:
        block_out, warps = 128, block_tokens // 8
    tiles = triton.cdiv(weight.d_out, block_out) * triton.cdiv(tokens, block_tokens)
    most = min(_MOST_SPLIT, len(weight.codes) // _LEAST_SPANS)
    programs = (4 if block_out * block_tokens <= 64 * 64 else 2) * _SMS
    while split * 2 <= most and tiles * split * 2 <= programs:
        split *= 2
    return ProductConfig(block_out, block_in=SPAN, split=split, warps=warps, stages=3)


def _block_tokens(tokens: int) -> int:
    power: int = triton.next_power_of_2(tokens)
    return min(_BLOCK_TOKENS, max(16, power))


def multiply(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, config: ProductConfig
) -> torch.Tensor:
    """Compute x·Wᵀ + b in one launch.

    x [tokens, d_in]
    weight: W [d_out, d_in]
    bias: b [d_out]
    config: launch parameters; block_in is SPAN
    → [tokens, d_out] like x
    """
    assert x.stride(1) == 1
    count, d_out, d_in, device = len(x), weight.d_out, weight.d_in, x.device
    y = torch.empty((count, d_out), dtype=x.dtype, device=device)
    block_tokens = _block_tokens(count)
    blocks, tiles = triton.cdiv(count, block_tokens), triton.cdiv(d_out, config.block_out)
    parts = counters = None
    if config.split > 1:
        size = (blocks * tiles, config.split, config.block_out, block_tokens)
        parts = torch.empty(size, dtype=torch.float32, device=device)
        counters = arrived(device)
    # programs that run at the same time read the same weights: token blocks vary fastest
    _multiply[(blocks, tiles, config.split)](
        x, weight.codes, weight.scales, weight.zeros, weight.order, weight.levels, bias, y,
        parts, counters,
        count, x.stride(0), d_out, d_in, weight.group,
        d_in % SPAN == 0, _scales_of_span(weight),
        device.type == "cpu",  # Triton's interpreter, which multiplies 16 bits as integers
        _TRITON[weight.rounded], MIDDLE, _ONES.get(x.dtype, 0), _OFFSETS.get(x.dtype, 0),
        block_tokens <= _TURNED, block_tokens, config.block_out, config.split, config.stages,
        num_warps=config.warps,
    )  # fmt: skip
    return y


def _scales_of_span(weight: PackedWeight) -> int:
    """Return the number of equal parts (1, 2 or 4) of a span of 128 inputs that need one scale
    each.
    """
    if weight.group % SPAN == 0 or weight.group == weight.d_in:
        return 1
    return 2 if weight.group % (SPAN // 2) == 0 else 4


def multiply_decoded(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute x·Wᵀ + b, with some outputs of the weight at a time decoded to x's dtype."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    y = x.new_empty((len(x), weight.d_out))
    most = _DECODED_BYTES // (weight.d_in * x.itemsize) // _DECODED_OUTPUTS
    most = max(1, most) * _DECODED_OUTPUTS
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
    spans, blocks = len(weight.codes), triton.cdiv(len(out), _DECODED_OUTPUTS)
    _decode_weight[(spans, blocks)](
        weight.codes, weight.scales, weight.zeros, weight.levels, out,
        first, len(out), weight.d_out, weight.d_in, weight.group,
        _scales_of_span(weight), _TRITON[weight.rounded], MIDDLE, _DECODED_OUTPUTS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _of_group(
    scales: tl.tensor, zeros: tl.tensor, place: tl.tensor, middle: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load one group's scale and zero point for each of some outputs, in float32.

    place: indices in scales and zeros. middle: zero point if none are stored.
    """
    scale = tl.load(scales + place).to(tl.float32)
    zero = tl.zeros_like(scale) + middle if zeros is None else tl.load(zeros + place).to(tl.float32)
    return scale, zero


@triton.jit  # type: ignore[untyped-decorator]
def _four(codes: tl.tensor, ones: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Take the four codes out of each element, as floats of 16 bits: the dtype's offset
    (_OFFSETS) + code.

    codes: int16 [rows, columns]. ones: 16-bit number into whose last four bits a code is put, one
        of _ONES.
    → four tensors like codes, bfloat16 or float16
    """
    if ones == 0x4300:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _FOUR_BFLOAT16, "=r,=r,=r,=r,r", [codes],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _FOUR_FLOAT16, "=r,=r,=r,=r,r", [codes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second, third, fourth


@triton.jit  # type: ignore[untyped-decorator]
def _code(codes: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """Take code number `index` out of each element of codes, int16 → int32."""
    return (codes.to(tl.int32) >> 4 * index) & 15


@triton.jit  # type: ignore[untyped-decorator]
def _level(levels: tl.tensor, code: tl.tensor, interpreted: tl.constexpr) -> tl.tensor:
    """Load NF4's values of some codes in float32.

    Loads by an instruction of its own on GPUs: Triton would make its usual load an asynchronous
    copy through shared memory, since a product reads the values.

    levels: the 16 values. code: index of each wanted value.

    interpreted: whether Triton's interpreter runs the kernel.
    """
    if interpreted:
        level = tl.load(levels + code)
    else:
        level = tl.inline_asm_elementwise(
            """{
            .reg .b64 place;
            mad.wide.u32 place, $2, 4, $1;
            ld.global.nc.f32 $0, [place];
            }""",
            "=f,l,r", [levels, code], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return level


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
    d_in: tl.tensor,
    group: tl.constexpr,
    even: tl.constexpr,
    scales_of_span: tl.constexpr,
    upcast: tl.constexpr,
    rounded: tl.constexpr,
    middle: tl.constexpr,
    ones: tl.constexpr,
    offset: tl.constexpr,
    turn: tl.constexpr,
    block_tokens: tl.constexpr,
    block_out: tl.constexpr,
    split: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Compute an output tile, some outputs of some tokens, or its partial sums over some inputs.

    x [count, d_in], bias [d_out]: operands. y [count, d_out]: output.
    codes, scales, zeros, order, levels, group: fields of the PackedWeight; None if it lacks them.
    parts: partial sums of all programs. arrived: counters (split_k.arrived). Both None without
        split-K.
    count: number of tokens. x_stride: elements of x from token to token.
    even: whether the last span is full. scales_of_span: number of parts of a span that need one
        scale each.
    upcast: whether to multiply in float32, as Triton's interpreter must.
    rounded: dtype that NF4's values are rounded to. middle: zero point if none are stored.
    ones: 16-bit number of x's dtype into whose last four bits a code is put. offset: number to
        subtract from the result to get the code. Both 0 for float32.
    turn: whether programs begin with different inputs.
    block_tokens, block_out: size of an output tile. split: number of programs among which the
        inputs of each output are divided. stages: of Triton's pipeline.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    tile, part = tl.program_id(1), tl.program_id(2)
    m, j = tl.arange(0, block_out), tl.arange(0, 32)
    n = tl.arange(0, block_tokens)
    token = tl.program_id(0) * block_tokens + n
    row = tile * block_out + m
    # Rows beyond the last repeat the last; they are not stored.
    inside = tl.minimum(row, d_out - 1)
    line = inside[:, None] * 32 + j[None, :]
    x_at = x + token[:, None].to(tl.int64) * x_stride
    sums = tl.zeros((block_out, block_tokens), tl.float32)
    spans = tl.cdiv(d_in, 128)
    groups_at = inside * tl.cdiv(d_in, group)
    begin, end = part * spans // split, (part + 1) * spans // split
    for step in tl.range(begin, end, num_stages=stages):
        span = turned(step, begin, end, tile) if turn else step
        # evict_first: the next step's weights will not be found in the cache anyway
        at = codes + span.to(tl.int64) * 32 * d_out
        packed = tl.load(at + line, eviction_policy="evict_first")
        if ones and levels is None and not upcast:
            four = _four(packed, ones)
        product = tl.zeros((block_out, block_tokens), tl.float32)
        for i in tl.static_range(4):
            first = span * 128 + 32 * i
            column = first + j
            known = token[:, None] < count
            if not even:
                known = known & (column < d_in)[None, :]
            if order is not None:
                column = tl.load(order + column, mask=column < d_in, other=0)
            inputs = tl.load(x_at + column[None, :], mask=known, other=0.0)
            if i % (4 // scales_of_span) == 0:
                place = groups_at + tl.minimum(first, d_in - 1) // group
                scale, zero = _of_group(scales, zeros, place, middle)
            if levels is not None:
                level = _level(levels, _code(packed, i), upcast)
                w = (level * scale[:, None]).to(rounded).to(dtype)
            elif ones and not upcast:
                # exact: (offset + q) − (offset + z)
                w = four[i] - (zero + offset).to(dtype)[:, None]
            else:
                w = (_code(packed, i).to(tl.float32) - zero[:, None]).to(dtype)
            if upcast:
                w, inputs = w.to(tl.float32), inputs.to(tl.float32)
            product = tl.dot(w, inputs.T, product, input_precision="ieee")
            if (i + 1) % (4 // scales_of_span) == 0:
                sums += product * scale[:, None] if levels is None else product
                product = tl.zeros((block_out, block_tokens), tl.float32)
    if split > 1:
        cell = m[:, None] * block_tokens + n[None, :]
        size: tl.constexpr = block_out * block_tokens
        place = tl.program_id(0) * tl.num_programs(1) + tile
        of_tile = parts + place.to(tl.int64) * split * size + cell
        tl.store(of_tile + part * size, sums)
        tl.debug_barrier()  # all of this program's sums are stored before it counts itself done
        if tl.atomic_add(arrived + place, 1) < split - 1:
            return
        sums = tl.zeros((block_out, block_tokens), tl.float32)
        for other in tl.static_range(split):
            # .cg: from the L2 cache, which holds other programs' sums
            sums += tl.load(of_tile + other * size, cache_modifier=".cg")
        tl.store(arrived + place, 0)
    real = row < d_out
    if bias is not None:
        sums += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)[:, None]
    out = y + token[None, :].to(tl.int64) * d_out + row[:, None]
    tl.store(out, sums.to(dtype), mask=real[:, None] & (token < count)[None, :])


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
    group: tl.constexpr,
    scales_of_span: tl.constexpr,
    rounded: tl.constexpr,
    middle: tl.constexpr,
    block_out: tl.constexpr,
) -> None:
    """Decode a tile of a weight: `block_out` outputs of a span of inputs.

    out [outputs, d_in]: decoded values of `outputs` outputs from `first` on.
    codes, scales, zeros, levels, group: fields of the PackedWeight; None if it lacks them.
    scales_of_span: number of equal parts of a span (128 inputs) that need one scale each.
    rounded: dtype that NF4's values are rounded to. middle: zero point if none are stored.
    """
    span = tl.program_id(0)
    row, j = tl.program_id(1) * block_out + tl.arange(0, block_out), tl.arange(0, 32)
    of_weight = first + tl.minimum(row, outputs - 1)
    line = (span.to(tl.int64) * d_out + of_weight[:, None]) * 32
    packed = tl.load(codes + line + j[None, :])
    at = out + row[:, None].to(tl.int64) * d_in
    for i in tl.static_range(4):
        column = span * 128 + 32 * i
        if i % (4 // scales_of_span) == 0:
            place = of_weight * tl.cdiv(d_in, group) + tl.minimum(column, d_in - 1) // group
            scale, zero = _of_group(scales, zeros, place, middle)
        if levels is None:
            value = (_code(packed, i).to(tl.float32) - zero[:, None]) * scale[:, None]
        else:
            value = (tl.load(levels + _code(packed, i)) * scale[:, None]).to(rounded)
        known = (row < outputs)[:, None] & (column + j < d_in)[None, :]
        tl.store(at + (column + j)[None, :], value.to(out.dtype.element_ty), mask=known)
