"""Gates in Triton: outputs of attention, delta nets or Mamba 2 times an activation, in one launch.

The activation is SiLU or sigmoid of a gate, which is the output of a linear layer.

kernels/pointwise/__init__.py defines shapes and dtypes.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise.lora_operands import lora_at, operands

_ELEMENTS = 2048  # of one program


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
    """Compute y / sqrt(mean(y²) + eps) · weight of y = x · silu(gate + lora), rounded once.

    See kernels.pointwise.
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
