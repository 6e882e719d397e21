"""Token masks in pure torch. See kernels.masks for their definition."""

import torch


def forbid_others(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Set logits of tokens that are not allowed to -inf, in place: see kernels.masks."""
    bits = (allowed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    bits = bits.flatten(1)[:, : logits.shape[1]].bool()  # [rows, vocab]
    logits.index_copy_(0, rows, logits[rows].masked_fill_(~bits, -torch.inf))
