"""Penalties and biases in pure torch. See kernels.penalties for their definition."""

import torch

from lorikeet_engine.kernels.penalties import IN_OUTPUT, PenaltyState


def penalise(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, state: PenaltyState
) -> torch.Tensor:
    """Copy rows of logits, and apply penalties and biases to the copies: see kernels.penalties."""
    x = logits[rows].float()
    seen = state.seen[slots]
    repetition, frequency, presence = state.penalties[slots].unsqueeze(-1).unbind(1)
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x += state.biases[slots]
    counts = seen // IN_OUTPUT
    return x - (counts * frequency + counts.clamp(max=1) * presence)
