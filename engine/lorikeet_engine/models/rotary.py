"""The rotary embedding's angles: how far each pair of a head turns at each position."""

import math

import torch

from lorikeet_engine.models.config import Llama3RopeScaling, RopeConfig


class RotaryEmbedding:
    """Cosines and sines of every position, [positions, head_dim / 2] float32."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device
    ) -> None:
        frequencies = _frequencies(rope, head_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, head_dim / 2] float32 of positions [tokens] int64."""
        return self._cos[positions], self._sin[positions]


def _frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents  # [head_dim / 2]
    return frequencies if rope.scaling is None else _stretch(frequencies, rope.scaling)


def _stretch(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    turns = scaling.original_context / (2 * math.pi / frequencies)  # in the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 0: slowed by factor, 1: as it was
    # in the order of the reference: a rounding here grows with the position
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies
