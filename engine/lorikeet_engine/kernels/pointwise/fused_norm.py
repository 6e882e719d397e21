"""Residual addition and RMS norm of hidden states in Triton, in one launch.

The launch also adds the LoRA delta of the product that is added to the hidden states. With a
RowExchange it sums product and delta over ranks as well.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.fp8 import LARGEST, LEAST_SCALE, Activations, Fp8Rows
from lorikeet_engine.kernels.fp8.fused import empty_rows, store_rounded
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise.lora_operands import lora_at, operands
from lorikeet_engine.kernels.pointwise.sum_over_ranks import exchange_operands, sum_over_ranks
from lorikeet_engine.parallel.sums import RowExchange


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    lora: LoraDelta | None = None,
    scale: float = 1.0,
    delta_weight: torch.Tensor | None = None,
    exchange: RowExchange | None = None,
    factor: float | None = None,
) -> torch.Tensor:
    """Set x to x + scale · (delta + lora), and return x / sqrt(mean(x²) + eps) · weight.

    Returns x if weight is None. With delta_weight, the delta is normalised first. With an exchange,
    delta + lora is rounded to x's dtype and summed over ranks before all else. See
    kernels.pointwise.
    """
    return _launch_add_rms_norm(
        x, delta, weight, eps, lora, scale, delta_weight, exchange, factor, None
    )


def add_rms_norm_fp8(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
    scale: float = 1.0,
    delta_weight: torch.Tensor | None = None,
    exchange: RowExchange | None = None,
    factor: float | None = None,
) -> Activations:
    """Compute add_rms_norm, and round each row of its result to FP8 in the same launch."""
    rounded = empty_rows(x)
    y = _launch_add_rms_norm(
        x, delta, weight, eps, lora, scale, delta_weight, exchange, factor, rounded
    )
    return Activations(y, rounded)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight · scale: see kernels.pointwise."""
    tokens, width = x.shape
    y, block = torch.empty_like(x), triton.next_power_of_2(width)
    _rms_norm[(tokens,)](
        x, weight, y, eps, scale, width, block, num_warps=min(32, max(1, block // 256))
    )
    return y


def _launch_add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    lora: LoraDelta | None,
    scale: float,
    delta_weight: torch.Tensor | None,
    exchange: RowExchange | None,
    factor: float | None,
    rounded: Fp8Rows | None,
) -> torch.Tensor:
    tokens, width = x.shape
    y = None if weight is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    fp8 = (None, None) if rounded is None else (rounded.rows, rounded.scales)
    elements = 16 if rounded is None else 8  # of a thread: rounding takes time of its own
    _add_rms_norm[(tokens,)](
        x, delta, *operands(lora), *exchange_operands(exchange), delta_weight, weight, y, *fp8,
        eps, scale, factor, width, block, LARGEST, LEAST_SCALE,
        num_warps=min(256 // elements, max(1, block // (32 * elements))),
    )  # fmt: skip
    return x if y is None else y


@triton.jit  # type: ignore[untyped-decorator]
def _rms_normed(x: tl.tensor, gains: tl.tensor, eps: tl.tensor, width: tl.constexpr) -> tl.tensor:
    """Return the RMS norm of a float32 row x, which must be 0 beyond its width.

    gains: weight of the norm, one factor for each column.
    eps: added to the mean square.
    """
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    return x * scale * gains.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Normalise one token's row of x [tokens, width], and write the result to y.

    weight, eps: weight of the norm, and number added to the mean square. scale: factor of y.
    block: `width` rounded up to a power of two.
    """
    columns = tl.arange(0, block)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gains = tl.load(weight + columns, mask=inside, other=0.0)
    normed = _rms_normed(row, gains, eps, width) * scale
    tl.store(y + at, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm(
    x: tl.tensor,
    delta: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    addresses: tl.tensor,
    epochs: tl.tensor,
    rank: tl.constexpr,
    world: tl.constexpr,
    most_rows: tl.constexpr,
    delta_weight: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    rounded_y: tl.tensor,
    scales: tl.tensor,
    eps: tl.tensor,
    scale: tl.constexpr,
    factor: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
) -> None:
    """Add one token's delta to its hidden state, and normalise the result.

    All operands that do not depend on a sum over ranks are loaded before the wait for that sum.

    x, delta, weight, eps, scale, delta_weight, factor: see kernels.pointwise.add_rms_norm. y:
        result.
    lora, adapted: LoRA delta of `delta`, and its number of rows; None: no delta.
    addresses, epochs, rank, world, most_rows: memory of a sum over ranks
        (sum_over_ranks.exchange_operands); addresses None: there is one rank.
    rounded_y, scales: FP8 rows and scales of the result; None: it is not rounded.
    block: `width` rounded up to a power of two.
    largest, least_scale: largest FP8 number, and lower bound of a row's scale.
    """
    columns = tl.arange(0, block)
    inside = columns < width
    token = tl.program_id(0).to(tl.int64)
    at = token * width + columns
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        gains = tl.load(weight + columns, mask=inside, other=0.0)
    if delta_weight is not None:
        delta_gains = tl.load(delta_weight + columns, mask=inside, other=0.0)
    if delta_weight is None and epochs is None:
        total += scale * added
        if lora is not None:
            total += scale * lora_at(lora, adapted, token, at, inside)
    else:
        if lora is not None:
            added += lora_at(lora, adapted, token, at, inside)
        added = added.to(x.dtype.element_ty)
        if epochs is not None:
            row = tl.program_id(0)
            added = sum_over_ranks(
                added, columns, inside, row, addresses, epochs, rank, world, most_rows, width
            )
        if delta_weight is not None:
            added = _rms_normed(added.to(tl.float32), delta_gains, eps, width)
            added = added.to(x.dtype.element_ty)
        total += scale * added.to(tl.float32)
    rounded = total.to(x.dtype.element_ty)
    if factor is not None:
        rounded = (rounded.to(tl.float32) * factor).to(x.dtype.element_ty)
    tl.store(x + at, rounded, mask=inside)
    if weight is not None:
        normed = _rms_normed(rounded.to(tl.float32), gains, eps, width)
        tl.store(y + at, normed.to(y.dtype.element_ty), mask=inside)
        if scales is not None:
            values = normed.to(y.dtype.element_ty).to(tl.float32)
            store_rounded(
                values, inside, columns, token, rounded_y, scales, width, largest, least_scale
            )
