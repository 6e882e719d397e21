"""Logit biases, and penalties of tokens that prompt or output have already.

`reference` is the equation in torch and runs on the CPU; `fused` holds a Triton kernel with the
same signature and bit-equal results.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

REPETITION, FREQUENCY, PRESENCE, PENALTIES = range(4)
"""Columns of PenaltyState.penalties."""
IN_PROMPT, IN_OUTPUT = 1, 2
"""Terms of PenaltyState.seen: once for a token in the prompt, and each time it is in the output."""


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """Counts, biases and penalties of sequences; a sequence has one slot in all tensors.

    seen [slots, vocab] int32: sums of IN_PROMPT and IN_OUTPUT.
    biases [slots, vocab] float32.
    penalties [slots, PENALTIES] float32.
    """

    seen: torch.Tensor
    biases: torch.Tensor
    penalties: torch.Tensor


def penalise(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, state: PenaltyState
) -> torch.Tensor:
    """Copy some rows of logits, and change the copies x by, in this order:

    x = x / repetition if x > 0, else x · repetition, for tokens of prompt and output
    x = x + bias
    x = x − (count · frequency + [count > 0] · presence), with the token's count in the output

    logits [any, vocab], dense
    rows [rows] int64: rows of the logits
    slots [rows] int64: slot of each of these rows
    → [rows, vocab] float32
    """
    changed: torch.Tensor = _operators(logits.device.type).penalise(logits, rows, slots, state)
    return changed


@cache
def _operators(device_type: str) -> ModuleType:
    # Triton is imported only here: a machine without a GPU may have none.
    name = "fused" if device_type == "cuda" else "reference"
    return import_module(f"lorikeet_engine.kernels.penalties.{name}")
