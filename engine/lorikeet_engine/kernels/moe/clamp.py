"""Clamped SwiGLU, by which gpt-oss gates its experts, in Triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def gate_clamped(
    gate_up: tl.tensor,
    biases: tl.tensor,
    pairs: tl.tensor,
    experts: tl.tensor,
    y: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute a block of columns of one row of clamped_swiglu.

    gate_up: gates, then values, of each row. biases: added to them, for each expert. y: result.
    pairs, experts: pair of token and expert of each row, and experts of each token.
    alpha, limit: factor of gates in the sigmoid, and limit of gates and values (Clamp).
    width: columns of y.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    expert = tl.load(experts + tl.load(pairs + row)).to(tl.int64)
    at, of_expert = gate_up + row * 2 * width + column, biases + expert * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    gate += tl.load(of_expert, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(of_expert + width, mask=inside, other=0.0).to(tl.float32)
    out = clamped(gate, value, alpha, limit)
    tl.store(y + row * width + column, out.to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def clamped(gate: tl.tensor, value: tl.tensor, alpha: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Return (u + 1) · g · sigmoid(alpha · g) in float32, for gates g and values u.

    Before, g is limited to at most `limit`, and u to −limit to limit.
    """
    gate = tl.minimum(gate, limit)
    value = tl.minimum(tl.maximum(value, -limit), limit)
    return (value + 1.0) * gate * tl.sigmoid(alpha * gate)
