"""The small layers of a decoder: RMS norm and rotary embedding."""

import math

import torch
from torch.nn import functional as F

from lorikeet_engine.models.config import Llama3Scaling, Rope
from lorikeet_engine.models.weights import Checkpoint


class RmsNorm:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension; the inside is float32.

    x [..., width] → y like x.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, width: int, eps: float) -> None:
        self.width = width
        self.eps = eps
        self.weight = checkpoint.read([f"{name}.weight"], [width])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise each row of x."""
        return F.rms_norm(x, (self.width,), self.weight, self.eps)


class Rotary:
    """Cosines and sines for every position, [positions, head_dim / 2] float32."""

    def __init__(self, rope: Rope, head_dim: int, positions: int, device: torch.device) -> None:
        frequencies = _frequencies(rope, head_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of positions [tokens] int64: cosines and sines [tokens, 1, head_dim / 2] float32."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its position's angle, in float32.

    x [tokens, heads, head_dim], cos and sin as Rotary.at gives them → a new tensor like x.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents  # [head_dim / 2]
    return frequencies if rope.scaling is None else _stretch(frequencies, rope.scaling)


def _stretch(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_context / (2 * math.pi / frequencies)  # in the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 0: slowed by factor, 1: as it was
    # in the order of the reference: a rounding here grows with the position
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies
