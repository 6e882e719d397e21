"""Angles of the rotary embeddings at every position, as cosines and sines."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lorikeet_engine.models.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    QueryScaling,
    RopeConfig,
    YarnRopeScaling,
)


@dataclass(frozen=True, slots=True)
class Turns:
    """Cosines and sines of the rotary angles at some positions, times RopeConfig.gain.

    cos, sin [positions, rotary_dim / 2] float32.
    query_gain [positions] float32: factor of queries; None: 1.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_gain: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> "Turns":
        """Return the cosines, sines and query gains at some positions [tokens] int64."""
        gain = None if self.query_gain is None else self.query_gain[positions]
        return Turns(self.cos[positions], self.sin[positions], gain)


class RotaryEmbeddings:
    """Cosines and sines of the rotary angles, for each rotary embedding of a model's layers.

    positions: number of positions, from 0 on, for which they are computed.
    """

    def __init__(
        self, ropes: Iterable[RopeConfig | None], positions: int, device: torch.device
    ) -> None:
        distinct = dict.fromkeys(rope for rope in ropes if rope is not None)
        self._turns = {rope: _turns(rope, positions, device) for rope in distinct}

    def at(self, positions: torch.Tensor) -> dict[RopeConfig | None, Turns]:
        """Look up cosines and sines at positions [tokens] int64, for each rotary embedding.

        The key None is for layers without rotary embedding; its tensors have no columns.
        """
        nothing = torch.empty(len(positions), 0, device=positions.device)
        at: dict[RopeConfig | None, Turns] = {None: Turns(nothing, nothing)}
        for rope, turns in self._turns.items():
            at[rope] = turns.at(positions)
        return at


def _turns(rope: RopeConfig, positions: int, device: torch.device) -> Turns:
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * _frequencies(rope)
    cos, sin = angles.cos() * rope.gain, angles.sin() * rope.gain
    gain = None if rope.queries is None else _query_gain(rope.queries, positions).to(device)
    return Turns(cos.to(device), sin.to(device), gain)


def _query_gain(scaling: QueryScaling, positions: int) -> torch.Tensor:
    spans = torch.arange(positions) // scaling.original_context
    return 1.0 + scaling.beta * torch.log(1.0 + spans)


def _frequencies(rope: RopeConfig) -> torch.Tensor:
    if isinstance(rope.scaling, ProportionalRopeScaling):
        head_dim, factor = rope.scaling.head_dim, rope.scaling.factor
        exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / rope.theta**exponents / factor
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    waves = rope.theta**exponents  # [rotary_dim / 2]
    # computed in the reference's order: a rounding error here grows with the position
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
    kept = kept.clamp(0.0, 1.0)  # 0: divided by factor, 1: unchanged
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies


def _kept(rope: RopeConfig, yarn: YarnRopeScaling) -> torch.Tensor:
    """Return how much of each frequency YaRN keeps unscaled, from 0 to 1: [rotary_dim / 2]."""

    def index(turns: float) -> float:
        """Return the fractional index of the frequency that makes `turns` rotations in
        original_context tokens.
        """
        per_turn = yarn.original_context / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(per_turn) / (2 * math.log(rope.theta))

    first, last = index(yarn.beta_fast), index(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first or 0.001
    indices = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    return 1.0 - ((indices - first) / width).clamp(0.0, 1.0)
