"""Log probabilities of some rows of logits: of their most likely tokens, and of tokens given later.

Of logits x with the largest at b, token t has (x[t] − b) · scale − log Σ exp((x − b) · scale), in
float32. Tokens are ranked by falling logit; of equal logits the lower id comes first (and 0 before
-0).

`reference` is this in torch and runs on the CPU; `fused` holds Triton kernels with the same
signatures.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

ROW, COUNT, SCALE, FIELDS = range(4)
"""The columns of `wanted` [n, FIELDS] int64.

A row of the logits; how many tokens of it; scale, above 0, bits of a float32.
"""
MOST = 32
"""The most tokens that can be wanted of a row."""


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """What some rows of logits say of tokens.

    norms [n, 2] float32: the row's largest logit b, and log Σ exp((x − b) · scale). packed
    [n, 1 + 2 · most] float32: the log probability of the given token, those of the most likely
    ones, and the ids of these, bits of int32. Behind a row's count both are arbitrary.
    """

    norms: torch.Tensor
    packed: torch.Tensor

    @property
    def most(self) -> int:
        """How many of the most likely tokens a row has room for."""
        return self.packed.shape[1] // 2


def likeliest(logits: torch.Tensor, wanted: torch.Tensor, most: int) -> LogprobRows:
    """Find the most likely tokens of some rows of logits [rows, vocab], dense, of any dtype.

    wanted: see FIELDS; counts are at most `most`, which is at most MOST, and vocab.
    """
    assert most <= MOST, f"{most} tokens of a row"
    found: LogprobRows = _operators(logits.device.type).likeliest(logits, wanted, most)
    return found


def set_given(
    found: LogprobRows, logits: torch.Tensor, wanted: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Set the first column of `packed` by the token that each row of the logits is given.

    tokens [rows] int64, below 0 for any. logits: as likeliest had them, at the tokens given.
    """
    _operators(logits.device.type).set_given(found, logits, wanted, tokens)


@cache
def _operators(device_type: str) -> ModuleType:
    # Triton is imported only here: a machine without a GPU may have none.
    name = "fused" if device_type == "cuda" else "reference"
    return import_module(f"lorikeet_engine.kernels.log_softmax.{name}")
