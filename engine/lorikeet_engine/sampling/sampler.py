"""Samples the next token of each choice from its logits: temperature, top_k, top_p, min_p."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.device.async_copies import upload
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
    draw_tokens,
)
from lorikeet_engine.request import SamplingParams
from lorikeet_engine.sampling.grammar import TokenBitmask
from lorikeet_engine.sampling.penalties import Penalties, PenaltySlot

NOT_FINITE = -1
"""In place of a token id, for a row whose logits are not finite."""
_LEAST_TEMPERATURE = 1e-30  # below it, its inverse is no float32; greedy long since
_64_BITS = (1 << 64) - 1


class SamplingRow(NamedTuple):
    """How to sample the next token of one choice.

    seed: the choice's own, of any size. step: the length of its output. These two alone decide
    which point of the distribution is taken. banned: ids that may not be sampled now, such as the
    stop ids below min_tokens. slot: the choice's own of the sampler's Penalties, if params change
    logits. allowed: the only ids that may be sampled, as Grammars sets them; None for all.
    """

    params: SamplingParams
    seed: int
    step: int
    banned: tuple[int, ...] = ()
    slot: PenaltySlot | None = None
    allowed: TokenBitmask | None = None


class Sampler:
    """Samples one token for each row.

    The cumulative distribution is inverted at a number in [0, 1) that is a hash of seed and step.
    So a row costs a few numbers whatever the vocabulary, and equal logits give the same token in
    every row of every batch and on every device. penalties: of the choices whose logits change.
    """

    def __init__(self, penalties: Penalties) -> None:
        self.penalties = penalties

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Tokens [rows] int64 for logits [rows, vocab] of any dtype, counted in the rows' slots.

        The repetition penalty comes first, then biases and the other penalties, in float32 copies
        of the rows that have any. What may not be sampled is set to -inf, in place. Then
        temperature, then top_k, then top_p of what top_k left (the most likely tokens whose
        probabilities together reach top_p), then min_p of what that left, as kernels.sampling
        defines it. Temperature 0 takes the first of the largest logits.
        NOT_FINITE where the largest is no number. The host waits for nothing.
        """
        changed = {i: row.slot.index for i, row in enumerate(rows) if row.slot is not None}
        plain = {i: row for i, row in enumerate(rows) if row.slot is None}
        tokens = _choose(logits, plain)
        if changed:
            # apart: kernels are compiled anew for a tensor that begins in the middle of another
            at, slots = (
                upload(np.array(list(some), np.int64), logits.device)
                for some in (changed, changed.values())
            )
            copies = self.penalties.change(logits, at, slots)
            chosen = _choose(copies, dict(enumerate(rows[i] for i in changed)))
            self.penalties.count(slots, chosen)
            tokens.index_copy_(0, at, chosen)
        return tokens


def _choose(logits: torch.Tensor, rows: Mapping[int, SamplingRow]) -> torch.Tensor:
    """Tokens [all rows of logits] int64; arbitrary in those that are not among `rows`."""
    _mask_banned(logits, rows)
    _mask_by_grammar(logits, rows)
    best, tokens = logits.max(dim=-1)
    finite = best.isfinite()
    sampled = {i: row for i, row in rows.items() if row.params.temperature > 0.0}
    if sampled:
        draws = upload(_draws(sampled, logits.shape[-1]), logits.device)
        draw_tokens(logits, best, tokens, draws)
    return tokens.masked_fill_(~finite, NOT_FINITE)


def _mask_banned(logits: torch.Tensor, rows: Mapping[int, SamplingRow]) -> None:
    bans = [(i, token) for i, row in rows.items() for token in row.banned]
    if bans:
        at, tokens = upload(np.array(bans, np.int64).T.copy(), logits.device)
        logits[at, tokens] = -torch.inf


def _mask_by_grammar(logits: torch.Tensor, rows: Mapping[int, SamplingRow]) -> None:
    masks = [(i, row.allowed) for i, row in rows.items() if row.allowed is not None]
    if masks:
        at = upload(np.array([i for i, _ in masks], np.int64), logits.device)
        octets = upload(np.stack([bits for _, bits in masks]), logits.device).unsqueeze(-1)
        allowed = (octets >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
        allowed = allowed.flatten(1)[:, : logits.shape[-1]].bool()  # [masks, vocab]
        logits.index_copy_(0, at, logits[at].masked_fill_(~allowed, -torch.inf))


def _draws(rows: Mapping[int, SamplingRow], vocab: int) -> npt.NDArray[np.int64]:
    """The columns of kernels.sampling for rows that are not greedy."""
    draws = np.empty((len(rows), DRAW_FIELDS), np.int64)
    params = [row.params for row in rows.values()]
    temperatures = np.array([max(p.temperature, _LEAST_TEMPERATURE) for p in params])
    draws[:, ROW] = list(rows)
    draws[:, UNIFORM] = _uniforms([(row.seed, row.step) for row in rows.values()])
    draws[:, SCALE] = (math.log2(math.e) / temperatures).astype(np.float32).view(np.int32)
    draws[:, TOP_K] = [p.top_k if p.top_k < vocab else 0 for p in params]
    draws[:, TOP_P] = np.array([p.top_p for p in params], np.float64).view(np.int64)
    draws[:, LEAST] = [max(1, math.ceil(p.min_p * ONE)) for p in params]
    return draws


def _uniforms(choices: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """64 random bits for each pair of seed and step."""
    seeds = np.array([seed & _64_BITS for seed, _ in choices], np.uint64)
    steps = np.array([step + 1 for _, step in choices], np.uint64)
    return _mix(_mix(seeds) + steps * np.uint64(NEXT_UNIFORM)).view(np.int64)


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's function: each bit depends on all 64."""
    for shift, factor in zip((30, 27), MIXERS, strict=True):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))
