"""Gates in Triton: the outputs of attention or of a delta net times an activation, in one launch.

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

    x, gate, eps: see kernels.pointwise. y: result. lora, adapted: LoRA delta of gate, as
        lora_operands.operands returns it.
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
