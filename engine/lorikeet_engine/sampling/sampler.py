"""Samples the next token of each choice from its logits: temperature, top_k, top_p."""

import hashlib
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.request import SamplingParams
from lorikeet_engine.sampling.grammar import TokenBitmask
from lorikeet_engine.sampling.penalties import add_biases, subtract_penalties

NOT_FINITE = -1
"""In place of a token id, for a row whose logits are not finite."""


class SamplingRow(NamedTuple):
    """How to sample the next token of one choice.

    seed: the choice's own, of any size. step: the length of its output. These two alone decide
    which point of the distribution is taken. output: its output tokens that the host has, if params
    have penalties; pending_row: the row of the step before that sampled one more, which is not read
    yet. banned: ids that may not be sampled now, such as the stop ids below min_tokens. allowed:
    the only ids that may be sampled, as Grammars sets them; None for all.
    """

    params: SamplingParams
    seed: int
    step: int
    banned: tuple[int, ...] = ()
    output: Sequence[int] = ()
    pending_row: int | None = None
    allowed: TokenBitmask | None = None


class Sampler:
    """Samples one token for each row.

    The cumulative distribution is inverted at a number in [0, 1) that is a hash of seed and step.
    So there is no state, a row costs one number whatever the vocabulary, and its token is the same
    in every batch and on every device.
    """

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        previous: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens [rows] int64 for logits [rows, vocab] of any dtype.

        Biases and penalties come first, then what may not be sampled is set to -inf, in place. Then
        temperature, then top_k, then top_p of what top_k left (the most likely tokens whose
        probabilities together reach top_p). Temperature 0 takes the first of the largest logits.
        NOT_FINITE where the largest is no number. previous: the tokens of the step before, on the
        device. The host waits for nothing.
        """
        logits = _with_penalties(logits, rows, previous)
        _mask_banned(logits, rows)
        _mask_by_grammar(logits, rows)
        best, tokens = logits.max(dim=-1)
        finite = best.isfinite()
        methods = [_method(row.params) for row in rows]
        for method, sample in _SAMPLERS.items():
            chosen = np.array([i for i, own in enumerate(methods) if own is method], np.int64)
            if len(chosen):
                at = upload(chosen, logits.device)
                tokens.index_copy_(0, at, sample(logits[at].float(), [rows[i] for i in chosen]))
        return tokens.masked_fill_(~finite, NOT_FINITE)


class _Method(Enum):
    GREEDY = "the largest logit"
    WHOLE = "sampled from the whole vocabulary"
    FILTERED = "sampled from its most likely part"


def _method(params: SamplingParams) -> _Method:
    if params.temperature == 0:
        return _Method.GREEDY
    return _Method.FILTERED if params.top_k or params.top_p < 1.0 else _Method.WHOLE


def _with_penalties(
    logits: torch.Tensor, rows: Sequence[SamplingRow], previous: torch.Tensor | None
) -> torch.Tensor:
    """The logits with biases and penalties: a float32 copy, or themselves if no row has any."""
    if not any(row.output or row.pending_row is not None or row.params.logit_bias for row in rows):
        return logits
    logits = logits.to(torch.float32, copy=True)
    params = [row.params for row in rows]
    add_biases(logits, params)
    outputs, pending_rows = [row.output for row in rows], [row.pending_row for row in rows]
    subtract_penalties(logits, params, outputs, pending_rows, previous)
    return logits


def _mask_banned(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    bans = [(i, token) for i, row in enumerate(rows) for token in row.banned]
    if bans:
        at, tokens = upload(np.array(bans, np.int64).T.copy(), logits.device)
        logits[at, tokens] = -torch.inf


def _mask_by_grammar(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    masks = [(i, row.allowed) for i, row in enumerate(rows) if row.allowed is not None]
    if masks:
        at = upload(np.array([i for i, _ in masks], np.int64), logits.device)
        octets = upload(np.stack([bits for _, bits in masks]), logits.device).unsqueeze(-1)
        allowed = (octets >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
        allowed = allowed.flatten(1)[:, : logits.shape[-1]].bool()  # [masks, vocab]
        logits.index_copy_(0, at, logits[at].masked_fill_(~allowed, -torch.inf))


def _sample_whole(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Tokens [rows] of logits [rows, vocab], from the whole distribution."""
    weights = _weights(logits, rows)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    tokens = _first_above(cumulative, _uniforms(rows, logits) * cumulative[:, -1:])
    # a parallel sum can step down by a rounding and so let a weight of 0 be hit
    possible = weights.gather(1, tokens) > 0
    return tokens.where(possible, weights.argmax(dim=-1, keepdim=True)).squeeze(1)


def _sample_filtered(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Tokens [rows] of logits [rows, vocab], from the top_k and top_p most likely."""
    logits, order = logits.sort(dim=-1, descending=True, stable=True)
    cumulative = _weights(logits, rows).cumsum(dim=-1, dtype=torch.float64)
    vocab = logits.shape[-1]
    top_k = _column([min(row.params.top_k or vocab, vocab) for row in rows], logits).long()
    top_p = _column([row.params.top_p for row in rows], logits)
    reach = top_p * cumulative.gather(1, top_k - 1)
    kept = top_k.minimum(torch.searchsorted(cumulative, reach) + 1)
    ranks = _first_above(cumulative, _uniforms(rows, logits) * cumulative.gather(1, kept - 1))
    return order.gather(1, ranks.minimum(kept - 1)).squeeze(1)


_SAMPLERS = {_Method.WHOLE: _sample_whole, _Method.FILTERED: _sample_filtered}


def _weights(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Probabilities but for a factor, float32; to be summed in float64, or the tail rounds away."""
    temperature = _column([row.params.temperature for row in rows], logits).float()
    best = logits.amax(dim=-1, keepdim=True)  # subtracted first: a tiny temperature overflows
    return ((logits - best) / temperature.clamp(min=1e-30)).exp()


def _first_above(cumulative: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight is above the row's point, [rows, 1]."""
    indices = torch.searchsorted(cumulative, points, right=True)
    return indices.clamp(max=cumulative.shape[-1] - 1)


def _uniforms(rows: Sequence[SamplingRow], like: torch.Tensor) -> torch.Tensor:
    return _column([_uniform(row.seed, row.step) for row in rows], like)


def _uniform(seed: int, step: int) -> float:
    """A number in [0, 1) of 53 random bits."""
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """[rows, 1] float64."""
    return upload(np.array(values, np.float64), like.device).unsqueeze(1)
