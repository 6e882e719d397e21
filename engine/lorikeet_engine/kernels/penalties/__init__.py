"""Logit biases, and penalties of tokens that already occur in the prompt or the output.

`fused` holds a Triton kernel with bit-equal results.
"""

from dataclasses import dataclass

import torch

from lorikeet_engine.kernels.by_device import by_device

REPETITION, FREQUENCY, PRESENCE, PENALTIES = range(4)
"""Columns of PenaltyState.penalties: the repetition, frequency and presence penalty."""
IN_PROMPT, IN_OUTPUT = 1, 2
"""Summands of PenaltyState.seen.

IN_PROMPT is added once for a token that occurs in the prompt, IN_OUTPUT for each time that it
occurs in the output.
"""


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """Token counts, biases and penalties of sequences; a sequence has the same slot in all tensors.

    seen [slots, vocab] int32: for each token, IN_PROMPT if it is in the prompt, plus IN_OUTPUT for
        each time that it is in the output.
    biases [slots, vocab] float32: numbers added to logits.
    penalties [slots, PENALTIES] float32: repetition, frequency and presence penalty.
    """

    seen: torch.Tensor
    biases: torch.Tensor
    penalties: torch.Tensor


@by_device
def penalise(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, state: PenaltyState
) -> torch.Tensor:
    """Copy some rows of logits, and apply penalties and biases to each logit x of the copies.

    In this order:
    x = x / repetition if x > 0, else x · repetition, for tokens of prompt and output
    x = x + bias
    x = x − (count · frequency + [count > 0] · presence), with the token's count in the output

    logits [any, vocab], contiguous
    rows [rows] int64: indices of the rows of logits to copy
    slots [rows] int64: slot in `state` of each of these rows
    → [rows, vocab] float32
    """
    x = logits[rows].float()
    seen = state.seen[slots]
    repetition, frequency, presence = state.penalties[slots].unsqueeze(-1).unbind(1)
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x += state.biases[slots]
    counts = seen // IN_OUTPUT
    return x - (counts * frequency + counts.clamp(max=1) * presence)
