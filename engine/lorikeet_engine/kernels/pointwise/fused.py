"""Pointwise operators in Triton: one launch each, every tensor read and written once."""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.fp8 import LARGEST, LEAST_SCALE, Activations
from lorikeet_engine.kernels.fp8.fused import divided, empty_rows, quantize_rows, scale_of
from lorikeet_engine.kernels.lora.expand_act import activated, expand_act_and_mul
from lorikeet_engine.kernels.lora.types import LoraDelta, UnexpandedDelta
from lorikeet_engine.kernels.pointwise.fused_norm import add_rms_norm, add_rms_norm_fp8, rms_norm
from lorikeet_engine.kernels.pointwise.gates import (
    gated_group_norm,
    gated_mean_squares,
    gated_rms_norm,
    sigmoid_gate,
)
from lorikeet_engine.kernels.pointwise.lora_operands import lora_at, operands
from lorikeet_engine.kernels.pointwise.rotary import mean_squares, rotary_and_store_kv

__all__ = [
    "act_and_mul",
    "act_and_mul_fp8",
    "add_delta",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "add_weighed",
    "gated_group_norm",
    "gated_mean_squares",
    "gated_rms_norm",
    "mean_squares",
    "rms_norm",
    "rotary_and_store_kv",
    "sigmoid_gate",
    "squared_relu",
    "squared_relu_fp8",
]

COLUMNS = 1024  # of one program of _act_and_mul, _squared_relu, _add_weighed and _add_delta
COLUMNS_AT_ONCE = 8192  # of a row, for one program of _act_and_mul_fp8


def act_and_mul(
    x: torch.Tensor, lora: LoraDelta | UnexpandedDelta | None = None, *, gelu: bool = False
) -> torch.Tensor:
    """Compute silu(g) · u, where [g, u] = x + lora, rounded once: see kernels.pointwise."""
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
    """Compute act_and_mul, and round each row of its result to FP8."""
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


def squared_relu(x: torch.Tensor, lora: LoraDelta | None = None) -> torch.Tensor:
    """Compute max(x + lora, 0)², rounded once: see kernels.pointwise."""
    tokens, width = x.shape
    y = x.new_empty((tokens, width))
    grid = (tokens, triton.cdiv(width, COLUMNS))
    _squared_relu[grid](x, *operands(lora), y, width, COLUMNS)
    return y


def squared_relu_fp8(x: torch.Tensor, lora: LoraDelta | None = None) -> Activations:
    """Compute squared_relu, and round each row of its result to FP8, in a launch each."""
    y = squared_relu(x, lora)
    return Activations(y, quantize_rows(y))


def add_weighed(
    y: torch.Tensor,
    x: torch.Tensor,
    lora: LoraDelta | None,
    weights: torch.Tensor | None = None,
    lora_of_weights: LoraDelta | None = None,
) -> None:
    """Compute y += sigmoid(weights + lora_of_weights) · (x + lora) in place, rounded once.

    See kernels.pointwise.
    """
    tokens, width = y.shape
    _add_weighed[(tokens, triton.cdiv(width, COLUMNS))](
        y, x, *operands(lora), weights, *operands(lora_of_weights), width, COLUMNS
    )


def add_delta(y: torch.Tensor, lora: LoraDelta) -> None:
    """Add a linear layer's LoRA delta to its output y [tokens, width], in place, rounded once."""
    tokens, width = y.shape
    _add_delta[(tokens, triton.cdiv(width, COLUMNS))](y, *operands(lora), width, COLUMNS)


@triton.jit  # type: ignore[untyped-decorator]
def _add_weighed(
    y: tl.tensor,
    x: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    weights: tl.tensor,
    lora_of_weights: tl.tensor,
    adapted_weights: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Add a shared expert's output to some columns of one token.

    y, x: tensor to add to, and the shared expert's output. block: number of columns.
    weights: each token's weight before the sigmoid; None: the weights are 1.
    lora, adapted, lora_of_weights, adapted_weights: LoRA deltas of x and of weights, and the number
        of rows of each; None: no delta.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    at = token * width + columns
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        value += lora_at(lora, adapted, token, at, inside)
    if weights is not None:
        first = tl.zeros((block,), tl.int64) + token  # each lane reads the token's only weight
        weight = tl.load(weights + first).to(tl.float32)
        if lora_of_weights is not None:
            weight += lora_at(lora_of_weights, adapted_weights, token, first, inside)
        value *= tl.sigmoid(weight)
    total = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) + value
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


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
    """Compute some columns of one token's activation, in float32; 0 beyond the width.

    x: gates, then values. columns: indices of the columns. width: columns of the activation.
    lora, adapted: LoRA delta of x, and its number of rows; None: no delta.
    """
    inside = columns < width
    at = token * (2 * width) + columns
    gates = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        gates += lora_at(lora, adapted, token, at, inside)
        values += lora_at(lora, adapted, token, at + width, inside)
    return activated(gates, gelu) * values


@triton.jit  # type: ignore[untyped-decorator]
def _squared_relu(
    x: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    y: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute some columns of one token's squared ReLU.

    x: input of the activation.
    y: result.
    lora, adapted: LoRA delta of x, and its number of rows; None: no delta.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    at = token * width + columns
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        value += lora_at(lora, adapted, token, at, inside)
    value = tl.maximum(value, 0.0)
    tl.store(y + at, (value * value).to(y.dtype.element_ty), mask=inside)


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
    """Compute some columns of one token's activation, silu(g) · u or gelu(g) · u.

    x: gates g, then values u. y: result.
    lora, adapted: LoRA delta of x, and its number of rows; None: no delta.
    """
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
    """Compute one token's activation, then read it again from the cache and round it to FP8.

    x: gates, then values. y: activation. rounded_y, scales: its FP8 rows and scales.
    lora, adapted: LoRA delta of x, and its number of rows; None: no delta.
    block: number of columns computed at once.
    largest, least_scale: largest FP8 number, and lower bound of a row's scale.
    """
    token = tl.program_id(0).to(tl.int64)
    most = tl.zeros((block,), tl.float32)
    for start in tl.static_range(0, width, block):
        columns = start + tl.arange(0, block)
        out = _gated(x, lora, adapted, token, columns, width, gelu).to(y.dtype.element_ty)
        tl.store(y + token * width + columns, out, mask=columns < width)
        most = tl.maximum(most, tl.abs(out.to(tl.float32)))
    scale = scale_of(most, largest, least_scale)
    tl.store(scales + token, scale)
    tl.debug_barrier()  # the whole row is stored before any thread reads
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
    """Add the LoRA delta to some columns of one token.

    y: output of the linear layer.
    lora, adapted: the LoRA delta, and its number of rows; None: no delta.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    at = token * width + columns
    total = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    total += lora_at(lora, adapted, token, at, inside)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
