"""Token masks in Triton: one launch, which reads the mask bits and no logits."""

import torch
import triton
import triton.language as tl

_TOKENS = 4096  # of one program


def forbid_others(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Set logits of tokens that are not allowed to -inf, in place: see kernels.masks."""
    vocab = logits.shape[1]
    _forbid_others[(len(rows), triton.cdiv(vocab, _TOKENS))](
        logits, rows, allowed, vocab, allowed.shape[1], _TOKENS, num_warps=8
    )


@triton.jit  # type: ignore[untyped-decorator]
def _forbid_others(
    logits: tl.tensor,
    rows: tl.tensor,
    allowed: tl.tensor,
    vocab: tl.constexpr,
    octets: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Set the logits of forbidden tokens to -inf, for a block of tokens of one row.

    rows: rows of logits to change. allowed: for each of them, a bit for each token, 1 if allowed.
    octets: bytes of a row of `allowed`.
    """
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    token = tl.program_id(1) * block + tl.arange(0, block)
    inside = token < vocab
    octet = tl.load(allowed + index * octets + token // 8, mask=inside, other=255)
    other = (octet.to(tl.int32) >> (token % 8)) & 1 == 0
    tl.store(logits + row * vocab + token, float("-inf"), mask=inside & other)
