"""Decay and β of a token in Triton, for the kernels of the gated delta rule; softplus."""

import triton
import triton.language as tl

from lorikeet_engine.kernels.pointwise.lora_operands import lora_at


@triton.jit  # type: ignore[untyped-decorator]
def gates(
    ba: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    stride: tl.tensor,
    inside: tl.tensor,
    value_heads: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Compute g, the logarithm of the decay, and β of one value head for some tokens.

    ba [tokens, 2 · value_heads]: b of each value head, then a of each, with β = sigmoid(b) and g =
        −exp(a_log) · softplus(a + dt_bias).
    a_log, dt_bias: weights of the decay (Decay).
    lora, adapted: LoRA delta of ba, and its number of rows; None: no delta.
    token, head: indices of the tokens and of the head. stride: elements of ba from token to token.
    inside: mask of the tokens that exist; the results are 0 elsewhere.
    """
    at = token * stride + head
    b = tl.load(ba + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(ba + at + value_heads, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        b += lora_at(lora, adapted, token, at, inside)
        a += lora_at(lora, adapted, token, at + value_heads, inside)
    a += tl.load(dt_bias + head).to(tl.float32)
    g = -tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus(a)
    return tl.where(inside, g, 0.0), tl.where(inside, tl.sigmoid(b), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def softplus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + exp(x)), without cancellation for small x and overflow for large x."""
    y = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + y
    return tl.where(x > 20.0, x, tl.log(u) + (y - (u - 1.0)) / u)  # (…) / u: digits that u lost
