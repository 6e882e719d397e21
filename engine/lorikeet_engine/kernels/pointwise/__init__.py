"""Operators between a decoder's matrix products: norms, rotary embedding, KV writes, SiLU, gates.

An operator that reads a product takes the product's LoRA delta as `lora` and adds it before
anything else, in float32 in the kernels. None adds nothing.

`reference` holds the equations in torch and runs on the CPU; `fused` holds Triton kernels with the
same signatures.
"""

from dataclasses import dataclass

import torch

from lorikeet_engine.kernels.by_device import by_device
from lorikeet_engine.kernels.fp8 import Activations
from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.kernels.lora.types import LoraDelta, UnexpandedDelta
from lorikeet_engine.parallel.sums import RowExchange

_operators = by_device(__name__)


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
    → [tokens, width] like x

    Computed in float32.
    """
    operator = _operators(x.device.type).add_rms_norm
    y: torch.Tensor = operator(x, delta, weight, eps, lora, scale, delta_weight, exchange, factor)
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0) -> torch.Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight · scale, in float32.

    x [tokens, width], contiguous
    weight [width], in x's dtype or float32
    → [tokens, width] like x
    """
    y: torch.Tensor = _operators(x.device.type).rms_norm(x, weight, eps, scale)
    return y


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
    """Compute add_rms_norm, and round each row of its result to FP8 as well.

    Arguments: see add_rms_norm, of which the result is Activations.rows.
    """
    operator = _operators(x.device.type).add_rms_norm_fp8
    y: Activations = operator(x, delta, weight, eps, lora, scale, delta_weight, exchange, factor)
    return y


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
    operator = _operators(qkv.device.type).rotary_and_store_kv
    operator(
        qkv, cos, sin, layer_kv, slots, lora, norm, scales,
        interleaved=interleaved, spans_head=spans_head, keys_are_values=keys_are_values,
        query_gain=query_gain,
    )  # fmt: skip


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
    operator = _operators(qkv.device.type).mean_squares
    squares: torch.Tensor = operator(qkv, kv_heads, processes, lora)
    return squares


def act_and_mul(
    x: torch.Tensor, lora: LoraDelta | UnexpandedDelta | None = None, *, gelu: bool = False
) -> torch.Tensor:
    """Compute an MLP's activation, silu(x[:, :width]) · x[:, width:].

    x [tokens, 2 · width], contiguous: gates, then the values that they gate
    lora: LoRA delta of x, added to x
    gelu: GELU, by its tanh formula, instead of SiLU
    → [tokens, width]
    """
    y: torch.Tensor = _operators(x.device.type).act_and_mul(x, lora, gelu=gelu)
    return y


def act_and_mul_fp8(
    x: torch.Tensor, lora: LoraDelta | UnexpandedDelta | None = None, *, gelu: bool = False
) -> Activations:
    """Compute act_and_mul, and round each row of its result to FP8 as well.

    x [tokens, 2 · width], contiguous: gates, then the values that they gate
    lora: LoRA delta of x, added to x
    gelu: GELU, by its tanh formula, instead of SiLU
    """
    y: Activations = _operators(x.device.type).act_and_mul_fp8(x, lora, gelu=gelu)
    return y


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
    y: torch.Tensor = _operators(x.device.type).gated_rms_norm(x, gate, weight, eps, lora)
    return y


def gated_group_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    lora: LoraDelta | None = None,
    means: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute y / sqrt(mean(y²) + eps) · weight of y = x · silu(gate): groups gated, then normed.

    x [tokens, groups, width], contiguous: output of Mamba 2's scan
    gate [tokens, groups, width], each group contiguous: part of a linear layer's output
    lora: LoRA delta of gate, whose rows have gate's shape and strides; added to gate
    weight [groups · width], in x's dtype or float32
    means [tokens, groups] float32: replaces mean(y²), if other ranks have parts of the groups
    → [tokens, groups, width] like x

    Computed in float32, and on CUDA rounded once.
    """
    operator = _operators(x.device.type).gated_group_norm
    y: torch.Tensor = operator(x, gate, weight, eps, lora, means)
    return y


def gated_mean_squares(
    x: torch.Tensor, gate: torch.Tensor, lora: LoraDelta | None = None
) -> torch.Tensor:
    """Compute the mean squares of x · silu(gate) → [tokens, groups] float32.

    x, gate [tokens, groups, width], lora: as for gated_group_norm
    """
    means: torch.Tensor = _operators(x.device.type).gated_mean_squares(x, gate, lora)
    return means


def squared_relu(x: torch.Tensor, lora: LoraDelta | None = None) -> torch.Tensor:
    """Compute max(x, 0)², the activation of an MLP without gate.

    x [tokens, width], contiguous
    lora: LoRA delta of x, added to x
    → [tokens, width]
    """
    y: torch.Tensor = _operators(x.device.type).squared_relu(x, lora)
    return y


def squared_relu_fp8(x: torch.Tensor, lora: LoraDelta | None = None) -> Activations:
    """Compute squared_relu, and round each row of its result to FP8 as well.

    x [tokens, width], contiguous
    lora: LoRA delta of x, added to x
    """
    y: Activations = _operators(x.device.type).squared_relu_fp8(x, lora)
    return y


def sigmoid_gate(
    x: torch.Tensor, gate: torch.Tensor, lora: LoraDelta | None = None
) -> torch.Tensor:
    """Compute x · sigmoid(gate + lora): the output gate of attention.

    x [tokens, heads, head_dim], contiguous: output of attention
    gate [tokens, heads, head_dim], each head contiguous: part of a linear layer's output
    lora: LoRA delta of gate, whose rows have gate's shape and strides
    → [tokens, heads, head_dim] like x
    """
    y: torch.Tensor = _operators(x.device.type).sigmoid_gate(x, gate, lora)
    return y


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
    _operators(y.device.type).add_weighed(y, x, lora, weights, lora_of_weights)


def add_delta(y: torch.Tensor, lora: LoraDelta) -> None:
    """Add the LoRA delta of a linear layer to its contiguous output y [tokens, width], in place."""
    _operators(y.device.type).add_delta(y, lora)
