"""Token masks: logits of tokens that a grammar does not allow become -inf."""

import torch

from lorikeet_engine.kernels.by_device import by_device


@by_device
def forbid_others(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    logits [any, vocab], contiguous
    rows [rows] int64: indices of the rows of logits to change, each at most once
    allowed [rows, at least vocab / 8] uint8: for each of these rows, token t is allowed if bit t %
      8, counted from the lowest, of byte t // 8 is set
    """
    bits = (allowed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    bits = bits.flatten(1)[:, : logits.shape[1]].bool()  # [rows, vocab]
    logits.index_copy_(0, rows, logits[rows].masked_fill_(~bits, -torch.inf))
