"""Changes logits by biases, and by penalties for tokens that were there already.

`reference` is the equation in torch and runs on the CPU; `fused` holds a Triton kernel with the
same signature, which gives the same bits.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

REPETITION, FREQUENCY, PRESENCE, PENALTIES = range(4)
"""The columns of PenaltyState.penalties."""
IN_PROMPT, IN_OUTPUT = 1, 2
"""What PenaltyState.seen has of a token for its being in the prompt, and for each time in the
output.
"""


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """What the logits of some sequences are changed by; a sequence has one slot in each tensor.

    seen [slots, vocab] int32: sums of IN_PROMPT and IN_OUTPUT. biases [slots, vocab] float32.
    penalties [slots, PENALTIES] float32.
    """

    seen: torch.Tensor
    biases: torch.Tensor
    penalties: torch.Tensor


def penalise(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, state: PenaltyState
) -> torch.Tensor:
    """Copies [rows, vocab] float32 of some rows of logits [any, vocab], dense, changed in turn by:

    x = x / repetition where x > 0, else x · repetition, for tokens of prompt and output;
    x = x + bias;
    x = x − (count · frequency + [count > 0] · presence), by the token's count in the output.

    rows, slots [rows] int64: the row of the logits, and the slot that belongs to it.
    """
    changed: torch.Tensor = _operators(logits.device.type).penalise(logits, rows, slots, state)
    return changed


@cache
def _operators(device_type: str) -> ModuleType:
    # Triton is imported only here: a machine without a GPU may have none.
    name = "fused" if device_type == "cuda" else "reference"
    return import_module(f"lorikeet_engine.kernels.penalties.{name}")
