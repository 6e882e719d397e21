"""Penalties and biases in Triton: one launch, every tensor read and written once."""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels import penalties
from lorikeet_engine.kernels.penalties import PenaltyState

_TOKENS = 2048  # of one program
_REPETITION = tl.constexpr(penalties.REPETITION)
_FREQUENCY, _PRESENCE = tl.constexpr(penalties.FREQUENCY), tl.constexpr(penalties.PRESENCE)
_PENALTIES, _IN_OUTPUT = tl.constexpr(penalties.PENALTIES), tl.constexpr(penalties.IN_OUTPUT)


def penalise(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, state: PenaltyState
) -> torch.Tensor:
    """Copy rows of logits, and apply penalties and biases to the copies: see kernels.penalties."""
    vocab = logits.shape[1]
    changed = logits.new_empty((len(rows), vocab), dtype=torch.float32)
    _penalise[(len(rows), triton.cdiv(vocab, _TOKENS))](
        logits, rows, slots, state.seen, state.biases, state.penalties, changed, vocab, _TOKENS,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return changed


@triton.jit  # type: ignore[untyped-decorator]
def _penalise(
    logits: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    seen: tl.tensor,
    biases: tl.tensor,
    penalties: tl.tensor,
    changed: tl.tensor,
    vocab: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Apply penalties and biases to a block of tokens of one row.

    logits, rows, slots: operands of kernels.penalties.penalise.
    seen, biases, penalties: counts of tokens, biases and penalties of all slots (PenaltyState).
    changed: output, the rows of logits after penalties and biases. block: number of tokens of a
        block.
    """
    index = tl.program_id(0).to(tl.int64)
    row, slot = tl.load(rows + index), tl.load(slots + index)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < vocab
    x = tl.load(logits + row * vocab + column, mask=inside, other=0.0).to(tl.float32)
    tokens = tl.load(seen + slot * vocab + column, mask=inside, other=0)
    bias = tl.load(biases + slot * vocab + column, mask=inside, other=0.0)
    repetition = tl.load(penalties + slot * _PENALTIES + _REPETITION)
    frequency = tl.load(penalties + slot * _PENALTIES + _FREQUENCY)
    presence = tl.load(penalties + slot * _PENALTIES + _PRESENCE)
    divided = tl.div_rn(x, tl.zeros_like(x) + repetition)
    x = tl.where(tokens > 0, tl.where(x > 0, divided, x * repetition), x)
    x += bias
    counts = tokens // _IN_OUTPUT
    x -= counts.to(tl.float32) * frequency + tl.minimum(counts, 1).to(tl.float32) * presence
    tl.store(changed + index * vocab + column, x, mask=inside)
