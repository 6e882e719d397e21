"""Triton kernel that adds sinks to the result of attention that was computed without them."""

import torch
import triton
import triton.language as tl


def add_sinks(mixed: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Multiply a result of attention by the share that each head's softmax leaves to the keys.

    With the sink s of a head, this share is 2^lse / (2^lse + exp(s)).

    mixed [tokens, heads, head_dim], contiguous: result without sinks, changed in place
    lse [tokens, heads] float32, contiguous: log2 of the sum of exponentials
    sinks [heads] float32: one more logit of each head's softmax, without a value
    """
    tokens, heads, head_dim = mixed.shape
    _add_sinks[(tokens,)](
        mixed, lse, sinks, heads, head_dim,
        triton.next_power_of_2(heads), triton.next_power_of_2(head_dim),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _add_sinks(
    mixed: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Multiply one token's result by the share that each head's softmax leaves to the keys.

    mixed, lse, sinks: result without sinks, log2 of the sum of exponentials, logits of the sinks.
    rows, columns: `heads` and `head_dim`, rounded up to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, rows), tl.arange(0, columns)
    sink = tl.load(sinks + head, mask=head < heads, other=0.0)
    sums = tl.load(lse + token * heads + head, mask=head < heads, other=0.0)
    share = tl.sigmoid(sums / 1.4426950408889634 - sink)  # log₂(e)
    at = mixed + (token * heads + head)[:, None] * head_dim + column[None, :]
    inside = (head < heads)[:, None] & (column < head_dim)[None, :]
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (values * share[:, None]).to(mixed.dtype.element_ty), mask=inside)
