"""Operators between a decoder's matrix products: norms, rotary embedding, KV writes, SiLU, gates.

An operator that reads a product takes the product's LoRA delta as `lora` and adds it before
anything else, in float32 in the kernels. None adds nothing.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.by_device import by_device
from lorikeet_engine.kernels.fp8 import Activations, quantize_rows
from lorikeet_engine.kernels.fp8_kv import KvScales, to_fp8
from lorikeet_engine.kernels.lora.types import LoraDelta, UnexpandedDelta
from lorikeet_engine.parallel.sums import RowExchange


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norms of queries and keys: over each head, or over all heads together.

    query_weight, key_weight: for norms over each head, [head_dim]; over all heads together, [heads
        · head_dim] and [kv_heads · head_dim]. In the dtype of the queries, or float32.
    eps: added to the mean square.
    mean_squares [tokens, 4] float32: output of the function `mean_squares`, summed over processes;
        needed if this process has only some of the heads that are normalised together.
    values: whether each head's value is normalised too, without a weight.
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float
    mean_squares: torch.Tensor | None = None
    values: bool = False


@by_device
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
    """Add scale · delta to x in place, and return x / sqrt(mean(x²) + eps) · weight.

    x [tokens, width], contiguous: hidden states
    delta [tokens, width], contiguous: output of a linear layer
    weight [width], in x's dtype or float32; None: x is returned
    lora: LoRA delta of that linear layer, added to delta
    delta_weight [width]: first, delta becomes delta / sqrt(mean(delta²) + eps) · delta_weight,
      rounded to its dtype before and after this norm; None: delta is not normalised
    exchange: memory through which delta and lora, this rank's parts, are summed over ranks before
      all else; None: delta and lora are complete. CUDA only
    factor: x is multiplied by it in place after the addition, and rounded before and after; None: 1
    fp8: round each row of the result to FP8 as well; weight is not None
    → [tokens, width] like x

    Computed in float32.
    """
    assert exchange is None, "ranks on CPUs have no RowExchange"
    add_lora_delta(delta, lora)
    if delta_weight is not None:
        delta = _normed(delta, delta_weight, eps)
    x += delta if scale == 1.0 else delta * scale
    if factor is not None:
        x *= factor
    if weight is None:
        return x
    return _with_fp8(_normed(x, weight, eps), fp8=fp8)


@by_device
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0) -> torch.Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight · scale, in float32.

    x [tokens, width], contiguous
    weight [width], in x's dtype or float32
    → [tokens, width] like x
    """
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * scale).to(x.dtype)


@by_device
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
    """Apply the rotary embedding to queries and keys, and write keys and values into KV pages.

    Each pair (x[i], x[i + rotary_dim / 2]) of a head's first rotary_dim elements, or if interleaved
    (x[2i], x[2i + 1]), is rotated by its position's angle, in float32:
    (a, b) → (a · cos − b · sin, b · cos + a · sin). The other elements stay. If spans_head, pairs
    are (x[i], x[i + head_dim / 2]), of which only the first rotary_dim / 2 are rotated.

    qkv [tokens, heads + 2 · kv_heads, head_dim], each token contiguous: queries, keys, values;
      queries are rotated in place, keys and values are left undefined
    cos, sin [tokens, rotary_dim / 2] float32, contiguous; without columns if nothing is rotated
    layer_kv [2, pages, page_size, kv_heads, head_dim or wider] like qkv, contiguous: keys, values;
      None: qkv has queries alone, [tokens, heads, head_dim]
    slots [tokens] int64: where to write each token, page · page_size + offset; −1: nowhere
    lora: LoRA delta of qkv, added to qkv
    norm: queries and keys x become x / sqrt(mean(x²) + eps) · weight first, in float32, rounded to
      qkv's dtype before and after; norm.mean_squares, if given, replaces mean(x²)
    scales: for FP8 layer_kv: keys and values are stored as to_fp8 (kernels/fp8_kv.py) rounds them
    keys_are_values: qkv [tokens, heads + kv_heads, head_dim] has no values, which are the keys
      before their norm and rotation
    query_gain [tokens] float32: factor of each token's rotated queries, which are rounded to qkv's
      dtype before and after
    """
    add_lora_delta(qkv.flatten(1), lora)
    given, kv_heads = None, 1 if layer_kv is None else layer_kv.shape[3]
    if layer_kv is None:  # as if with a key and a value that are not kept
        given, slots, scales = qkv, torch.full_like(slots, -1), None
        layer_kv = qkv.new_empty(2, 1, 1, 1, qkv.shape[2])
        qkv = F.pad(qkv, (0, 0, 0, 2))
    elif keys_are_values:
        given = qkv[:, :-kv_heads]
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
    if given is not None:
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


@by_device
def mean_squares(
    qkv: torch.Tensor, kv_heads: int, processes: int, lora: LoraDelta | None = None
) -> torch.Tensor:
    """Compute this process's part of the mean squares of each token's queries and keys.

    The sum of all processes' results is mean(q²) and mean(k²) over all heads.

    qkv [tokens, heads + 2 · kv_heads, head_dim], each token contiguous: as for rotary_and_store_kv
    processes: number of processes, all with equally many heads
    lora: LoRA delta of qkv, added to qkv
    → [tokens, 4] float32: the part of queries, the part of keys, 0, 0; the zeros pad a token to 16
      bytes, which all ways to sum over ranks support
    """
    summed = qkv.flatten(1).clone()
    add_lora_delta(summed, lora)
    squares = summed.view_as(qkv).float().square()
    means = qkv.new_zeros(len(qkv), 4, dtype=torch.float32)
    means[:, 0] = squares[:, : -2 * kv_heads].mean((1, 2)) / processes
    means[:, 1] = squares[:, -2 * kv_heads : -kv_heads].mean((1, 2)) / processes
    return means


@by_device
def act_and_mul(
    x: torch.Tensor,
    lora: LoraDelta | UnexpandedDelta | None = None,
    *,
    gelu: bool = False,
    fp8: bool = False,
) -> torch.Tensor | Activations:
    """Compute an MLP's activation, silu(x[:, :width]) · x[:, width:].

    x [tokens, 2 · width], contiguous: gates, then the values that they gate
    lora: LoRA delta of x, added to x
    gelu: GELU, by its tanh formula, instead of SiLU
    fp8: round each row of the result to FP8 as well
    → [tokens, width]
    """
    assert not isinstance(lora, UnexpandedDelta), "deltas on CPUs are expanded"
    add_lora_delta(x, lora)
    gates, values = x.chunk(2, dim=-1)
    gates = F.gelu(gates, approximate="tanh") if gelu else F.silu(gates)
    return _with_fp8(gates * values, fp8=fp8)


@by_device
def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
) -> torch.Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight · silu(gate): each head normed, then gated.

    x [tokens, heads, head_dim], contiguous: output of a gated delta net
    gate [tokens, heads, head_dim], each head contiguous: part of a linear layer's output
    weight [head_dim], in x's dtype or float32
    lora: LoRA delta of gate, whose rows have gate's shape and strides; added to gate
    → [tokens, heads, head_dim] like x

    Computed in float32, and on CUDA rounded once.
    """
    add_lora_delta(gate, lora)
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * F.silu(gate.float())).to(x.dtype)


@by_device
def gated_group_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
    means: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate x, then apply an RMS norm to each token's groups.

    With y = x · silu(gate), and m the mean of y² over the width of a group, the result is
    y / sqrt(m + eps) · weight.

    x [tokens, groups, width], contiguous: output of Mamba 2's scan
    gate [tokens, groups, width], each group contiguous: part of a linear layer's output
    lora: LoRA delta of gate, whose rows have gate's shape and strides; added to gate
    weight [groups · width], in x's dtype or float32
    means [tokens, groups] float32: taken as m, if other ranks have parts of the groups; None: m is
      computed from y
    → [tokens, groups, width] like x

    Computed in float32, and on CUDA rounded once.
    """
    add_lora_delta(gate, lora)
    gated = x.float() * F.silu(gate.float())
    means = gated.square().mean(-1) if means is None else means
    normed = gated * (means.unsqueeze(-1) + eps).rsqrt()
    return (normed * weight.float().view(x.shape[1:])).to(x.dtype)


@by_device
def gated_mean_squares(
    x: torch.Tensor, gate: torch.Tensor, lora: LoraDelta | None = None
) -> torch.Tensor:
    """Compute the mean squares of x · silu(gate) → [tokens, groups] float32.

    x, gate [tokens, groups, width], lora: as for gated_group_norm
    """
    gate = gate.clone()
    add_lora_delta(gate, lora)
    return (x.float() * F.silu(gate.float())).square().mean(-1)


@by_device
def squared_relu(
    x: torch.Tensor, lora: LoraDelta | None = None, *, fp8: bool = False
) -> torch.Tensor | Activations:
    """Compute max(x, 0)², the activation of an MLP without gate.

    x [tokens, width], contiguous
    lora: LoRA delta of x, added to x
    fp8: round each row of the result to FP8 as well
    → [tokens, width]
    """
    add_lora_delta(x, lora)
    return _with_fp8(F.relu(x).square(), fp8=fp8)


@by_device
def sigmoid_gate(
    x: torch.Tensor, gate: torch.Tensor, lora: LoraDelta | None = None
) -> torch.Tensor:
    """Compute x · sigmoid(gate + lora): the output gate of attention.

    x [tokens, heads, head_dim], contiguous: output of attention
    gate [tokens, heads, head_dim], each head contiguous: part of a linear layer's output
    lora: LoRA delta of gate, whose rows have gate's shape and strides
    → [tokens, heads, head_dim] like x
    """
    add_lora_delta(gate, lora)
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


@by_device
def add_weighed(
    y: torch.Tensor,
    x: torch.Tensor,
    lora: LoraDelta | None,
    weights: torch.Tensor | None = None,
    lora_of_weights: LoraDelta | None = None,
) -> None:
    """Add a shared expert's output to y in place: y becomes y + sigmoid(weights) · x.

    y [tokens, width], contiguous: summed output of the routed experts
    x [tokens, width], contiguous: output of the shared expert
    lora: LoRA delta of x, added to x; None: no adapter
    weights [tokens, 1]: output of a linear layer; its sigmoid is each token's weight. None: the
      weights are 1
    lora_of_weights: LoRA delta of weights, added to weights
    """
    add_lora_delta(x, lora)
    if weights is None:
        y += x
        return
    add_lora_delta(weights, lora_of_weights)
    y += torch.sigmoid(weights) * x


@by_device
def add_delta(y: torch.Tensor, lora: LoraDelta) -> None:
    """Add the LoRA delta of a linear layer to its contiguous output y [tokens, width], in place."""
    add_lora_delta(y, lora)


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


def _with_fp8(y: torch.Tensor, *, fp8: bool) -> torch.Tensor | Activations:
    return Activations(y, quantize_rows(y)) if fp8 else y


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def add_lora_delta(y: torch.Tensor, lora: LoraDelta | None) -> None:
    """Add the LoRA delta of a product y in place; None adds nothing.

    The first dimension of y is tokens, and lora.rows have y's shape.
    """
    if lora is not None:
        y[: lora.tokens] += lora.rows[: lora.tokens]
