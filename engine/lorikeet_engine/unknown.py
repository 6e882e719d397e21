"""Tokens that are drawn and that only the device knows."""

import torch


def filled_in(token_ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Token ids, int64 of any shape, where −1−i stands for drawn[i], of the step before.

    At least 0: a row whose logits were not finite drew none, and its sequence ends anyway.
    """
    theirs = drawn[(-1 - token_ids).clamp(min=0)].clamp(min=0)
    return torch.where(token_ids < 0, theirs, token_ids)
