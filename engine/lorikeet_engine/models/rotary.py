"""The rotary embedding's angles: how far each pair of a head turns at each position."""

import math

import torch

from lorikeet_engine.models.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeConfig,
    YarnRopeScaling,
)


class RotaryEmbedding:
    """Cosines and sines of every position, times the gain, [positions, rotary_dim / 2] float32."""

    def __init__(self, rope: RopeConfig, positions: int, device: torch.device) -> None:
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * _frequencies(rope)
        self._cos = (angles.cos() * rope.gain).to(device)
        self._sin = (angles.sin() * rope.gain).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, rotary_dim / 2] float32 of positions [tokens] int64."""
        return self._cos[positions], self._sin[positions]


def _frequencies(rope: RopeConfig) -> torch.Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    waves = rope.theta**exponents  # [rotary_dim / 2]
    # each in the order of the reference: a rounding here grows with the position
    match rope.scaling:
        case None:
            return 1.0 / waves
        case LinearRopeScaling(factor):
            return 1.0 / waves / factor
        case Llama3RopeScaling() as llama3:
            return _stretch(1.0 / waves, llama3)
        case YarnRopeScaling() as yarn:
            kept = _kept(rope, yarn)
            return 1.0 / (yarn.factor * waves) * (1.0 - kept) + 1.0 / waves * kept
        case LongRopeScaling(factors):
            return 1.0 / (torch.tensor(factors) * waves)


def _stretch(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    turns = scaling.original_context / (2 * math.pi / frequencies)  # in the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 0: slowed by factor, 1: as it was
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies


def _kept(rope: RopeConfig, yarn: YarnRopeScaling) -> torch.Tensor:
    """How much of each frequency is as it was, 0 to 1: [rotary_dim / 2]."""

    def index(turns: float) -> float:
        """Which frequency turns so often in the original context, were there one between two."""
        per_turn = yarn.original_context / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(per_turn) / (2 * math.log(rope.theta))

    first, last = index(yarn.beta_fast), index(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first or 0.001
    indices = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    return 1.0 - ((indices - first) / width).clamp(0.0, 1.0)
