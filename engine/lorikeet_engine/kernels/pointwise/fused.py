"""The pointwise operators in Triton: one launch each, every tensor read and written once.

`lora`, what adapters add to the product that an operator reads, is added first, in float32.
kernels/pointwise/__init__.py passes every call on CUDA on to here; it has the dtypes, too.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.fp8 import LARGEST, LEAST_SCALE, Activations, Fp8Rows
from lorikeet_engine.kernels.fp8.fused import (
    divided,
    empty_rows,
    quantize_rows,
    scale_of,
    store_rounded,
)
from lorikeet_engine.kernels.lora.expand_act import activated, expand_act_and_mul
from lorikeet_engine.kernels.lora.types import LoraDelta, UnexpandedDelta
from lorikeet_engine.kernels.pointwise.fused_rotary import mean_squares, rotary_and_store_kv
from lorikeet_engine.kernels.pointwise.lora_operands import lora_at, operands

__all__ = [
    "act_and_mul",
    "act_and_mul_fp8",
    "add_delta",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "mean_squares",
    "rotary_and_store_kv",
]

COLUMNS = 1024  # gated, or added to, by one program
COLUMNS_AT_ONCE = 8192  # of a row that one program gates and rounds


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    lora: LoraDelta | None = None,
    scale: float = 1.0,
    delta_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Set x to x + scale · (delta + lora); returns x / sqrt(mean(x²) + eps) · weight, or x.

    In float32 inside. x, delta [tokens, width], weight [width] → like x. With delta_weight [width],
    delta + lora is normed so before. What is normed is rounded before, as in the reference.
    """
    return _launch_add_rms_norm(x, delta, weight, eps, lora, scale, delta_weight, None)


def add_rms_norm_fp8(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
    scale: float = 1.0,
    delta_weight: torch.Tensor | None = None,
) -> Activations:
    """Do what add_rms_norm does, and round each of its rows to FP8 in the same launch."""
    rounded = empty_rows(x)
    y = _launch_add_rms_norm(x, delta, weight, eps, lora, scale, delta_weight, rounded)
    return Activations(y, rounded)


def _launch_add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    lora: LoraDelta | None,
    scale: float,
    delta_weight: torch.Tensor | None,
    rounded: Fp8Rows | None,
) -> torch.Tensor:
    tokens, width = x.shape
    y = None if weight is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    fp8 = (None, None) if rounded is None else (rounded.rows, rounded.scales)
    _add_rms_norm[(tokens,)](
        x, delta, *operands(lora), delta_weight, weight, y, *fp8, eps, scale, width, block,
        LARGEST, LEAST_SCALE,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return x if y is None else y


def act_and_mul(
    x: torch.Tensor, lora: LoraDelta | UnexpandedDelta | None = None, *, gelu: bool = False
) -> torch.Tensor:
    """silu(x[:, :width]) · x[:, width:] of x + lora [tokens, 2 · width] → [tokens, width].

    gelu: GELU in SiLU's place. Rounded once. In a prefill expand_act_and_mul expands the adapters'
    delta in the same launch.
    """
    if isinstance(lora, UnexpandedDelta):
        return expand_act_and_mul(x, lora, gelu=gelu)
    tokens, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty((tokens, width))
    grid = (tokens, triton.cdiv(width, COLUMNS))
    _act_and_mul[grid](x, *operands(lora), y, width, COLUMNS, gelu)
    return y


def act_and_mul_fp8(
    x: torch.Tensor, lora: LoraDelta | UnexpandedDelta | None = None, *, gelu: bool = False
) -> Activations:
    """Do what act_and_mul does, and round each of its rows to FP8: in the same launch if it can.

    Only where the adapters' delta is expanded in that launch, by programs that have parts of rows,
    another one rounds.
    """
    if isinstance(lora, UnexpandedDelta):
        y = expand_act_and_mul(x, lora, gelu=gelu)
        return Activations(y, quantize_rows(y))
    tokens, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty((tokens, width))
    rounded = empty_rows(y)
    block = min(COLUMNS_AT_ONCE, triton.next_power_of_2(width))
    _act_and_mul_fp8[(tokens,)](
        x, *operands(lora), y, rounded.rows, rounded.scales, width, block, gelu,
        LARGEST, LEAST_SCALE,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return Activations(y, rounded)


def add_delta(y: torch.Tensor, lora: LoraDelta) -> None:
    """Add to y [tokens, width] what adapters add to it, in place; rounded once."""
    tokens, width = y.shape
    _add_delta[(tokens, triton.cdiv(width, COLUMNS))](y, *operands(lora), width, COLUMNS)


@triton.jit  # type: ignore[untyped-decorator]
def _rms_normed(
    x: tl.tensor, weight: tl.tensor, columns: tl.tensor, eps: tl.tensor, width: tl.constexpr
) -> tl.tensor:
    """Norm a row of float32, which is 0 behind its width."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    return x * scale * tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm(
    x: tl.tensor,
    delta: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    delta_weight: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    rounded_y: tl.tensor,
    scales: tl.tensor,
    eps: tl.tensor,
    scale: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
) -> None:
    """Compute one token."""
    columns = tl.arange(0, block)
    inside = columns < width
    token = tl.program_id(0).to(tl.int64)
    at = token * width + columns
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    if delta_weight is None:
        total += scale * added
        if lora is not None:
            total += scale * lora_at(lora, adapted, token, at, inside)
    else:
        if lora is not None:
            added += lora_at(lora, adapted, token, at, inside)
        added = added.to(x.dtype.element_ty).to(tl.float32)
        added = _rms_normed(added, delta_weight, columns, eps, width)
        total += scale * added.to(x.dtype.element_ty).to(tl.float32)
    rounded = total.to(x.dtype.element_ty)
    tl.store(x + at, rounded, mask=inside)
    if weight is not None:
        normed = _rms_normed(rounded.to(tl.float32), weight, columns, eps, width)
        tl.store(y + at, normed.to(y.dtype.element_ty), mask=inside)
        if scales is not None:
            values = normed.to(y.dtype.element_ty).to(tl.float32)
            store_rounded(
                values, inside, columns, token, rounded_y, scales, width, largest, least_scale
            )


@triton.jit  # type: ignore[untyped-decorator]
def _gated(
    x: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    token: tl.tensor,
    columns: tl.tensor,
    width: tl.constexpr,
    gelu: tl.constexpr,
) -> tl.tensor:
    """Compute some columns of one token, in float32; 0 behind the width."""
    inside = columns < width
    at = token * (2 * width) + columns
    gates = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        gates += lora_at(lora, adapted, token, at, inside)
        values += lora_at(lora, adapted, token, at + width, inside)
    return activated(gates, gelu) * values


@triton.jit  # type: ignore[untyped-decorator]
def _act_and_mul(
    x: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    y: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    gelu: tl.constexpr,
) -> None:
    """Compute some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    out = _gated(x, lora, adapted, token, columns, width, gelu)
    tl.store(y + token * width + columns, out.to(y.dtype.element_ty), mask=columns < width)


@triton.jit  # type: ignore[untyped-decorator]
def _act_and_mul_fp8(
    x: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    y: tl.tensor,
    rounded_y: tl.tensor,
    scales: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    gelu: tl.constexpr,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
) -> None:
    """Compute one token, then read it again from the cache and round it: it outgrows registers."""
    token = tl.program_id(0).to(tl.int64)
    most = tl.zeros((block,), tl.float32)
    for start in tl.static_range(0, width, block):
        columns = start + tl.arange(0, block)
        out = _gated(x, lora, adapted, token, columns, width, gelu).to(y.dtype.element_ty)
        tl.store(y + token * width + columns, out, mask=columns < width)
        most = tl.maximum(most, tl.abs(out.to(tl.float32)))
    scale = scale_of(most, largest, least_scale)
    tl.store(scales + token, scale)
    tl.debug_barrier()  # the whole row lies there before any thread reads
    for start in tl.static_range(0, width, block):
        columns = start + tl.arange(0, block)
        inside = columns < width
        at = token * width + columns
        out = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(rounded_y + at, divided(out, scale, rounded_y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_delta(
    y: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    at = token * width + columns
    total = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    total += lora_at(lora, adapted, token, at, inside)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
