"""Pointwise operators in Triton: one launch each, every tensor read and written once.

add_rms_norm's launch also adds the LoRA delta of the product that is added to the hidden states.
With a RowExchange it sums product and delta over ranks as well. `rotary` has the operators of
queries, keys and values.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.fp8 import LARGEST, LEAST_SCALE, Activations
from lorikeet_engine.kernels.fp8.fused import (
    divided,
    empty_rows,
    quantize_rows,
    scale_of,
    store_rounded,
)
from lorikeet_engine.kernels.lora.expand_act import activated, expand_act_and_mul
from lorikeet_engine.kernels.lora.types import LoraDelta, UnexpandedDelta
from lorikeet_engine.kernels.pointwise.lora_operands import lora_at, operands
from lorikeet_engine.kernels.pointwise.rotary import mean_squares, rotary_and_store_kv
from lorikeet_engine.kernels.pointwise.sum_over_ranks import exchange_operands, sum_over_ranks
from lorikeet_engine.parallel.sums import RowExchange

__all__ = ["mean_squares", "rotary_and_store_kv"]

COLUMNS = 1024  # of one program of _act_and_mul, _squared_relu, _add_weighed and _add_delta
COLUMNS_AT_ONCE = 8192  # of a row, for one program of _act_and_mul_fp8
_ELEMENTS = 2048  # of one program of _gate


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
    *,
    fp8: bool = False,
) -> torch.Tensor | Activations:
    """Add delta to x in place, and return the RMS norm of the new x.

    The steps, each in float32:
    1. d = delta + lora. With an exchange or a delta_weight, d is rounded to x's dtype.
    2. With an exchange, d is summed over ranks.
    3. With a delta_weight, d becomes d / sqrt(mean(d²) + eps) · delta_weight, and is rounded.
    4. x becomes x + scale · d, and is rounded.
    5. With a factor, x becomes x · factor, and is rounded again.
    6. The result is x / sqrt(mean(x²) + eps) · weight, of the x of step 5; that x itself if weight
       is None.

    fp8: round each row of the result to FP8 as well, and return both as Activations; weight must
        not be None.

    See kernels.pointwise.add_rms_norm for the other parameters.
    """
    tokens, width = x.shape
    y = None if weight is None else torch.empty_like(x)
    rounded = empty_rows(x) if fp8 else None
    block = triton.next_power_of_2(width)
    elements = 16 if rounded is None else 8  # of a thread: rounding takes time of its own
    _add_rms_norm[(tokens,)](
        x, delta, *operands(lora), *exchange_operands(exchange), delta_weight, weight, y,
        *((None, None) if rounded is None else (rounded.rows, rounded.scales)),
        eps, scale, factor, width, block, LARGEST, LEAST_SCALE,
        num_warps=min(256 // elements, max(1, block // (32 * elements))),
    )  # fmt: skip
    y = x if y is None else y
    return y if rounded is None else Activations(y, rounded)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight · scale: see kernels.pointwise."""
    tokens, width = x.shape
    y, block = torch.empty_like(x), triton.next_power_of_2(width)
    _rms_norm[(tokens,)](
        x, weight, y, eps, scale, width, block, num_warps=min(32, max(1, block // 256))
    )
    return y


def act_and_mul(
    x: torch.Tensor,
    lora: LoraDelta | UnexpandedDelta | None = None,
    *,
    gelu: bool = False,
    fp8: bool = False,
) -> torch.Tensor | Activations:
    """Compute silu(g) · u, where [g, u] = x + lora, rounded once: see kernels.pointwise."""
    if isinstance(lora, UnexpandedDelta):
        y = expand_act_and_mul(x, lora, gelu=gelu)
        return Activations(y, quantize_rows(y)) if fp8 else y
    tokens, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty((tokens, width))
    if not fp8:
        grid = (tokens, triton.cdiv(width, COLUMNS))
        _act_and_mul[grid](x, *operands(lora), y, width, COLUMNS, gelu)
        return y
    rounded = empty_rows(y)
    block = min(COLUMNS_AT_ONCE, triton.next_power_of_2(width))
    _act_and_mul_fp8[(tokens,)](
        x, *operands(lora), y, rounded.rows, rounded.scales, width, block, gelu,
        LARGEST, LEAST_SCALE,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return Activations(y, rounded)


def squared_relu(
    x: torch.Tensor, lora: LoraDelta | None = None, *, fp8: bool = False
) -> torch.Tensor | Activations:
    """Compute max(x + lora, 0)² in float32, and round it once to x's dtype.

    fp8: in a second launch, round each row of the result to FP8 as well, and return both as
        Activations.

    See kernels.pointwise.squared_relu for the other parameters.
    """
    tokens, width = x.shape
    y = x.new_empty((tokens, width))
    grid = (tokens, triton.cdiv(width, COLUMNS))
    _squared_relu[grid](x, *operands(lora), y, width, COLUMNS)
    return Activations(y, quantize_rows(y)) if fp8 else y


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


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
) -> torch.Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight · silu(gate + lora): see kernels.pointwise."""
    return _launch_gate(x, gate, weight, eps, lora)


def sigmoid_gate(
    x: torch.Tensor, gate: torch.Tensor, lora: LoraDelta | None = None
) -> torch.Tensor:
    """Compute x · sigmoid(gate + lora), rounded once: see kernels.pointwise."""
    return _launch_gate(x, gate, None, 0.0, lora)


def gated_group_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
    means: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate x, then apply an RMS norm to each token's groups.

    With y = x · silu(gate + lora), and m the mean of y² over the width of a group, the result is
    y / sqrt(m + eps) · weight. It is computed in float32, and rounded once.

    means [tokens, groups] float32: taken as m, if other ranks have parts of the groups
        (gated_mean_squares); None: m is computed from y.

    See kernels.pointwise.gated_group_norm for the other parameters.
    """
    y = x.new_empty(x.shape)
    _launch_group(x, gate, weight, lora, means, y, eps)
    return y


def gated_mean_squares(
    x: torch.Tensor, gate: torch.Tensor, lora: LoraDelta | None = None
) -> torch.Tensor:
    """Compute the mean squares of x · silu(gate + lora): see kernels.pointwise."""
    means = x.new_empty(x.shape[:2], dtype=torch.float32)
    _launch_group(x, gate, None, lora, means, None, 0.0)
    return means


def _launch_group(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    lora: LoraDelta | None,
    means: torch.Tensor | None,
    y: torch.Tensor | None,
    eps: float,
) -> None:
    tokens, groups, width = x.shape
    assert gate.stride(2) == 1, gate.stride()
    assert lora is None or lora.rows.stride() == gate.stride(), lora.rows.stride()
    columns = triton.next_power_of_2(width)
    _gate_group[(tokens, groups)](
        x, gate, *operands(lora), weight, means, y, eps, gate.stride(0), gate.stride(1), width,
        columns, num_warps=max(1, min(16, columns // 512)),
    )  # fmt: skip


def _launch_gate(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    lora: LoraDelta | None,
) -> torch.Tensor:
    tokens, heads, head_dim = x.shape
    assert gate.stride(2) == 1, gate.stride()
    assert lora is None or lora.rows.stride() == gate.stride(), lora.rows.stride()
    y = x.new_empty(x.shape)
    columns = triton.next_power_of_2(head_dim)
    rows = max(1, min(_ELEMENTS // columns, triton.next_power_of_2(heads)))
    _gate[(tokens, triton.cdiv(heads, rows))](
        x, gate, *operands(lora), weight, y, eps, gate.stride(0), gate.stride(1), heads, head_dim,
        rows, columns,
    )  # fmt: skip
    return y


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


@triton.jit  # type: ignore[untyped-decorator]
def _gate(
    x: tl.tensor,
    gate: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    eps: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Multiply some heads of one token by the activations of their gates.

    x, gate [tokens, heads, head_dim]: input, and gates before their activation. y: result.
    eps: added to the mean square.
    lora, adapted: LoRA delta of gate, and its number of rows; None: no delta.
    weight: weight of the norm before a SiLU gate; None: a sigmoid gate without a norm.
    token_stride, head_stride: elements of `gate` from token to token and from head to head.
    rows: number of heads. columns: head_dim rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * rows + tl.arange(0, rows))[:, None]
    column = tl.arange(0, columns)[None, :]
    inside = (head < heads) & (column < head_dim)
    at = (token * heads + head) * head_dim + column
    out = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    place = token * token_stride + head * head_stride + column
    gates = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        gates += lora_at(lora, adapted, token, place, inside)
    if weight is not None:
        gains = tl.load(weight + column, mask=column < head_dim, other=0.0).to(tl.float32)
        out = out / tl.sqrt(tl.sum(out * out, 1) / head_dim + eps)[:, None] * gains * gates
    tl.store(y + at, (out * tl.sigmoid(gates)).to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_group(
    x: tl.tensor,
    gate: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    weight: tl.tensor,
    means: tl.tensor,
    y: tl.tensor,
    eps: tl.tensor,
    token_stride: tl.tensor,
    group_stride: tl.tensor,
    width: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Gate and norm one group of one token, or compute the mean square of what is gated.

    x, gate [tokens, groups, width]: input, and gates before their activation.
    weight, eps: weight of the norm, and number added to the mean square.
    y: result; None: the mean square is written to `means`.
    means: mean squares to use; None: that of the group.
    lora, adapted: LoRA delta of gate, and its number of rows; None: no delta.
    token_stride, group_stride: elements of `gate` from token to token and from group to group.
    columns: width rounded up to a power of two.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = tl.num_programs(1)
    column = tl.arange(0, columns)
    inside = column < width
    at = (token * groups + group) * width + column
    place = token * token_stride + group * group_stride + column
    gates = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        gates += lora_at(lora, adapted, token, place, inside)
    out = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * gates * tl.sigmoid(gates)
    if y is None:
        tl.store(means + token * groups + group, tl.sum(out * out, 0) / width)
    else:
        if means is None:
            mean = tl.sum(out * out, 0) / width
        else:
            mean = tl.load(means + token * groups + group)
        gains = tl.load(weight + group * width + column, mask=inside, other=0.0).to(tl.float32)
        out = out / tl.sqrt(mean + eps) * gains
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
