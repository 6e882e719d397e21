"""Token masks: logits of tokens that a grammar does not allow become -inf.

`reference` is the definition in torch and runs on the CPU; `fused` holds a Triton kernel with the
same signature.
"""

import torch

from lorikeet_engine.kernels.by_device import by_device

__all__ = ["forbid_others"]

_operators = by_device(__name__)


def forbid_others(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    logits [any, vocab], contiguous
    rows [rows] int64: indices of the rows of logits to change, each at most once
    allowed [rows, at least vocab / 8] uint8: for each of these rows, token t is allowed if bit t %
      8, counted from the lowest, of byte t // 8 is set
    """
    _operators(logits.device.type).forbid_others(logits, rows, allowed)
