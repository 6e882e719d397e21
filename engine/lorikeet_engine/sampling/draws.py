"""Sampling parameters of a step's rows of logits, and their conversion for kernels.sampling."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorikeet_engine.kernels.sampling import (
    DRAW_FIELDS,
    LEAST,
    MIXERS,
    NEXT_UNIFORM,
    ONE,
    ROW,
    SCALE,
    TOP_K,
    TOP_P,
    UNIFORM,
)
from lorikeet_engine.request import SamplingParams
from lorikeet_engine.sampling.penalties import PenaltySlot

LEAST_TEMPERATURE = 1e-30  # the inverse of lower ones overflows float32; greedy in effect
_64_BITS = (1 << 64) - 1


class SamplingRow(NamedTuple):
    """Sampling parameters for the next token of one choice of a request.

    Seed and step alone determine the random number by which the token is drawn.

    params: the request's sampling parameters.
    seed: random seed of the choice, any integer.
    step: number of tokens that the choice's output already has.
    banned: ids that may not be sampled now, such as stop ids before min_tokens.
    slot: the choice's slot in the sampler's Penalties, if params has penalties or biases.
    drafted: drafted (predicted) token from which this row's logits were computed. The row's result
        counts only if the row before samples this token. None for a row without such a token.
    """

    params: SamplingParams
    seed: int
    step: int
    banned: tuple[int, ...] = ()
    slot: PenaltySlot | None = None
    drafted: int | None = None


def draws_of(rows: Mapping[int, SamplingRow], vocab: int) -> npt.NDArray[np.int64]:
    """Encode sampling parameters for the kernel that draws tokens, int64 [rows, DRAW_FIELDS].

    rows: sampling parameters by row of the logits; rows of temperature 0 must be left out.
    vocab: number of tokens in the vocabulary.
    """
    draws = np.empty((len(rows), DRAW_FIELDS), np.int64)
    params = [row.params for row in rows.values()]
    temperatures = np.array([max(p.temperature, LEAST_TEMPERATURE) for p in params])
    draws[:, ROW] = list(rows)
    draws[:, UNIFORM] = _uniforms([(row.seed, row.step) for row in rows.values()])
    draws[:, SCALE] = (math.log2(math.e) / temperatures).astype(np.float32).view(np.int32)
    draws[:, TOP_K] = [p.top_k if p.top_k < vocab else 0 for p in params]
    draws[:, TOP_P] = np.array([p.top_p for p in params], np.float64).view(np.int64)
    draws[:, LEAST] = [max(1, math.ceil(p.min_p * ONE)) for p in params]
    return draws


def _uniforms(choices: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Hash each pair of seed and step to 64 random bits."""
    seeds = np.array([seed & _64_BITS for seed, _ in choices], np.uint64)
    steps = np.array([step + 1 for _, step in choices], np.uint64)
    return _mix(_mix(seeds) + steps * np.uint64(NEXT_UNIFORM)).view(np.int64)


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix 64 bits by the hash SplitMix64: each bit of the result depends on all 64."""
    for shift, factor in zip((30, 27), MIXERS, strict=True):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))
