"""The pointwise operators in plain torch; the package says what each computes."""

import torch
from torch.nn import functional as F


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See the package."""
    x += delta
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See the package."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def gate(x: torch.Tensor) -> torch.Tensor:
    """See the package."""
    gates, values = x.chunk(2, dim=-1)
    return F.silu(gates) * values
