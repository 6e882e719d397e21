"""Pointwise operators in pure torch. See kernels.pointwise for their definitions."""

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.fp8 import Activations
from lorikeet_engine.kernels.fp8.reference import quantize_rows
from lorikeet_engine.kernels.fp8_kv import KvScales, to_fp8
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise import QkNorm
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
    """Set x to x + scale · (delta + lora), and return its RMS norm: see kernels.pointwise."""
    assert exchange is None, "ranks on CPUs have no RowExchange"
    add_lora_delta(delta, lora)
    if delta_weight is not None:
        delta = _normed(delta, delta_weight, eps)
    x += delta if scale == 1.0 else delta * scale
    if factor is not None:
        x *= factor
    if weight is None:
        return x
    return _normed(x, weight, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight · scale: see kernels.pointwise."""
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * scale).to(x.dtype)


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
    """Compute add_rms_norm, and round each row of its result to FP8: see kernels.pointwise."""
    y = add_rms_norm(x, delta, weight, eps, lora, scale, delta_weight, exchange, factor)
    return Activations(y, quantize_rows(y))


def rotary_and_store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer_kv: torch.Tensor | None,
    slots: torch.Tensor,
    lora: LoraDelta | None = None,
    norm: QkNorm | None = None,
    scales: KvScales | None = None,
    *,
    interleaved: bool = False,
    spans_head: bool = False,
    keys_are_values: bool = False,
    query_gain: torch.Tensor | None = None,
) -> None:
    """Rotate queries and keys, and write keys and values into KV pages: see kernels.pointwise."""
    add_lora_delta(qkv.flatten(1), lora)
    if layer_kv is None:  # as if with a key and a value that are not kept
        tokens, heads, head_dim = qkv.shape
        padded = torch.cat((qkv, qkv.new_zeros(tokens, 2, head_dim)), dim=1)
        nowhere = torch.full_like(slots, -1)
        none = qkv.new_empty(2, 1, 1, 1, head_dim)
        rotary_and_store_kv(
            padded, cos, sin, none, nowhere, None, norm,
            interleaved=interleaved, spans_head=spans_head, query_gain=query_gain,
        )  # fmt: skip
        qkv.copy_(padded[:, :heads])
        return
    kv_heads = layer_kv.shape[3]
    given = qkv[:, :-kv_heads]
    if keys_are_values:
        qkv = torch.cat((qkv, qkv[:, -kv_heads:]), dim=1)
    if norm is not None:
        queries, keys = qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads]
        if norm.values:
            values = qkv[:, -kv_heads:]
            values.copy_(F.rms_norm(values.float(), values.shape[-1:], eps=norm.eps))
        of_queries, of_keys = _means_of(norm)
        _rms_norm(queries, norm.query_weight, norm.eps, of_queries)
        _rms_norm(keys, norm.key_weight, norm.eps, of_keys)
    turned = qkv[:, :-kv_heads, : 2 * cos.shape[1]]
    if spans_head:
        whole = F.pad(cos, (0, qkv.shape[2] // 2 - cos.shape[1]), value=1.0)
        turned, sin = qkv[:, :-kv_heads], F.pad(sin, (0, whole.shape[1] - sin.shape[1]))
        cos = whole
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = cos.shape[-1]
    pairs = turned.view(*turned.shape[:-1], *((half, 2) if interleaved else (2, half)))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)  # [tokens, heads, half, 2]
    first, second = pairs.float().unbind(-1)
    pairs.copy_(torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1))
    if query_gain is not None:
        qkv[:, : -2 * kv_heads].mul_(query_gain[:, None, None])
    if keys_are_values:
        given.copy_(qkv[:, : -2 * kv_heads])
    keys, values = layer_kv.flatten(1, 2)[..., : qkv.shape[2]]  # [slots, kv_heads, head_dim]
    stored = slots >= 0
    new_keys, new_values = qkv[stored, -2 * kv_heads : -kv_heads], qkv[stored, -kv_heads:]
    if scales is not None:  # as bytes: torch has no index_copy_ for FP8
        new_keys = to_fp8(new_keys, scales.key).view(torch.uint8)
        new_values = to_fp8(new_values, scales.value).view(torch.uint8)
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    keys.index_copy_(0, slots[stored], new_keys)
    values.index_copy_(0, slots[stored], new_values)


def mean_squares(
    qkv: torch.Tensor, kv_heads: int, processes: int, lora: LoraDelta | None = None
) -> torch.Tensor:
    """Compute each token's mean(q²) / processes and mean(k²) / processes: see kernels.pointwise."""
    summed = qkv.flatten(1).clone()
    add_lora_delta(summed, lora)
    squares = summed.view_as(qkv).float().square()
    means = qkv.new_zeros(len(qkv), 4, dtype=torch.float32)
    means[:, 0] = squares[:, : -2 * kv_heads].mean((1, 2)) / processes
    means[:, 1] = squares[:, -2 * kv_heads : -kv_heads].mean((1, 2)) / processes
    return means


def _means_of(norm: QkNorm) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a norm's mean squares of queries and of keys, each [tokens, 1, 1].

    Both are None if norm.mean_squares is None.
    """
    if norm.mean_squares is None:
        return None, None
    of_queries, of_keys, *_ = norm.mean_squares.unsqueeze(-1).unsqueeze(-1).unbind(1)
    return of_queries, of_keys


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, mean_squares: torch.Tensor | None
) -> None:
    """Apply an RMS norm to x [tokens, heads, head_dim] in place.

    weight: [head_dim] normalises each head, [heads · head_dim] all heads together.
    mean_squares: mean squares over all heads that are normalised together, including those of other
        processes; None: computed from x.
    eps: added to the mean square.
    """
    rows = x.reshape(len(x), -1, len(weight))
    if mean_squares is None:
        normed = _normed(rows, weight, eps)
    else:
        normed = rows.float() / (mean_squares + eps).sqrt() * weight.float()
    x.copy_(normed.view_as(x))


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def act_and_mul(
    x: torch.Tensor, lora: LoraDelta | None = None, *, gelu: bool = False
) -> torch.Tensor:
    """Compute silu(g) · u, where [g, u] = x + lora: see kernels.pointwise."""
    add_lora_delta(x, lora)
    gates, values = x.chunk(2, dim=-1)
    return (F.gelu(gates, approximate="tanh") if gelu else F.silu(gates)) * values


def act_and_mul_fp8(
    x: torch.Tensor, lora: LoraDelta | None = None, *, gelu: bool = False
) -> Activations:
    """Compute act_and_mul, and round each row of its result to FP8: see kernels.pointwise."""
    y = act_and_mul(x, lora, gelu=gelu)
    return Activations(y, quantize_rows(y))


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
) -> torch.Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight · silu(gate + lora): see kernels.pointwise."""
    add_lora_delta(gate, lora)
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * F.silu(gate.float())).to(x.dtype)


def gated_group_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
    means: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute y / sqrt(mean(y²) + eps) · weight of y = x · silu(gate + lora).

    See kernels.pointwise.
    """
    add_lora_delta(gate, lora)
    gated = x.float() * F.silu(gate.float())
    means = gated.square().mean(-1) if means is None else means
    normed = gated * (means.unsqueeze(-1) + eps).rsqrt()
    return (normed * weight.float().view(x.shape[1:])).to(x.dtype)


def gated_mean_squares(
    x: torch.Tensor, gate: torch.Tensor, lora: LoraDelta | None = None
) -> torch.Tensor:
    """Compute the mean squares of x · silu(gate + lora): see kernels.pointwise."""
    gate = gate.clone()
    add_lora_delta(gate, lora)
    return (x.float() * F.silu(gate.float())).square().mean(-1)


def squared_relu(x: torch.Tensor, lora: LoraDelta | None = None) -> torch.Tensor:
    """Compute max(x + lora, 0)²: see kernels.pointwise."""
    add_lora_delta(x, lora)
    return F.relu(x).square()


def squared_relu_fp8(x: torch.Tensor, lora: LoraDelta | None = None) -> Activations:
    """Compute squared_relu, and round each row of its result to FP8: see kernels.pointwise."""
    y = squared_relu(x, lora)
    return Activations(y, quantize_rows(y))


def sigmoid_gate(
    x: torch.Tensor, gate: torch.Tensor, lora: LoraDelta | None = None
) -> torch.Tensor:
    """Compute x · sigmoid(gate + lora): see kernels.pointwise."""
    add_lora_delta(gate, lora)
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


def add_weighed(
    y: torch.Tensor,
    x: torch.Tensor,
    lora: LoraDelta | None,
    weights: torch.Tensor | None = None,
    lora_of_weights: LoraDelta | None = None,
) -> None:
    """Compute y += sigmoid(weights + lora_of_weights) · (x + lora) in place.

    See kernels.pointwise.
    """
    add_lora_delta(x, lora)
    if weights is None:
        y += x
        return
    add_lora_delta(weights, lora_of_weights)
    y += torch.sigmoid(weights) * x


def add_delta(y: torch.Tensor, lora: LoraDelta) -> None:
    """Add a linear layer's LoRA delta to its output y in place: see kernels.pointwise."""
    add_lora_delta(y, lora)


def add_lora_delta(y: torch.Tensor, lora: LoraDelta | None) -> None:
    """Add the LoRA delta of a product y in place; None adds nothing.

    The first dimension of y is tokens, and lora.rows have y's shape.
    """
    if lora is not None:
        y[: lora.tokens] += lora.rows[: lora.tokens]
