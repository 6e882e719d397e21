"""Choosing the next token of each choice from its logits."""

import hashlib
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch

from lorikeet_engine.device.copies import upload
from lorikeet_engine.request import SamplingParams
from lorikeet_engine.sampling.grammar import Bits
from lorikeet_engine.sampling.penalties import add_biases, subtract_penalties

NOT_FINITE = -1  # in place of a token


class SamplingRow(NamedTuple):
    """How to draw the next token of one choice.

    seed is the choice's own, of any size; step counts the tokens that the choice has made. The
    two alone decide which point of the distribution is drawn. made: what the choice has made, if
    params penalise it, and pending: the row of the step before that drew one more, which is not
    known yet. banned: ids that may not come at this step, such as the stop ids before min_tokens.
    allowed: ids that alone may come, as Grammars.fill sets them; None for all.
    """

    params: SamplingParams
    seed: int
    step: int
    banned: tuple[int, ...] = ()
    made: Sequence[int] = ()
    pending: int | None = None
    allowed: Bits | None = None


class Sampler:
    """Draws one token for each row.

    The draw inverts the cumulative distribution at a number in [0, 1) that is a hash of seed and
    step. So it holds no state, costs one number a row whatever the vocabulary, and gives the same
    token in whatever batch the row stands and on whatever device.
    """

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens [rows] int64 for logits [rows, vocab] of any dtype.

        Biases and penalties come first, then what may not be drawn is set to -inf, in place. Then
        temperature, then top_k, then top_p of what top_k left (the most likely tokens whose
        probabilities together reach top_p). Temperature 0 takes the first of the largest logits.
        NOT_FINITE where the largest is no number. before: the tokens of the step before, on the
        device. The host waits for nothing.
        """
        logits = _adjusted(logits, rows, before)
        _ban(logits, rows)
        _allow(logits, rows)
        best, tokens = logits.max(dim=-1)
        finite = best.isfinite()
        ways = [_way(row.params) for row in rows]
        for way, draw in ((_Way.WHOLE, _draw), (_Way.FILTERED, _draw_filtered)):
            chosen = np.array([i for i, its_way in enumerate(ways) if its_way is way], np.int64)
            if len(chosen):
                at = upload(chosen, logits.device)
                tokens.index_copy_(0, at, draw(logits[at].float(), [rows[i] for i in chosen]))
        return tokens.masked_fill_(~finite, NOT_FINITE)


class _Way(Enum):
    GREEDY = "the largest logit"
    WHOLE = "drawn from the whole vocabulary"
    FILTERED = "drawn from its most likely part"


def _way(params: SamplingParams) -> _Way:
    if params.temperature == 0:
        return _Way.GREEDY
    return _Way.FILTERED if params.top_k or params.top_p < 1.0 else _Way.WHOLE


def _adjusted(
    logits: torch.Tensor, rows: Sequence[SamplingRow], before: torch.Tensor | None
) -> torch.Tensor:
    """With biases and penalties: the logits themselves if no row has any, else a float32 copy."""
    if not any(row.made or row.pending is not None or row.params.logit_bias for row in rows):
        return logits
    logits = logits.to(torch.float32, copy=True)
    params = [row.params for row in rows]
    add_biases(logits, params)
    made, pending = [row.made for row in rows], [row.pending for row in rows]
    subtract_penalties(logits, params, made, pending, before)
    return logits


def _ban(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    bans = [(i, token) for i, row in enumerate(rows) for token in row.banned]
    if bans:
        at, tokens = upload(np.array(bans, np.int64).T.copy(), logits.device)
        logits[at, tokens] = -torch.inf


def _allow(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    masks = [(i, row.allowed) for i, row in enumerate(rows) if row.allowed is not None]
    if masks:
        at = upload(np.array([i for i, _ in masks], np.int64), logits.device)
        octets = upload(np.stack([bits for _, bits in masks]), logits.device).unsqueeze(-1)
        allowed = (octets >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
        allowed = allowed.flatten(1)[:, : logits.shape[-1]].bool()  # [masks, vocab]
        logits.index_copy_(0, at, logits[at].masked_fill_(~allowed, -torch.inf))


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Tokens [rows] of logits [rows, vocab], from the whole distribution."""
    weights = _weights(logits, rows)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    tokens = _first_above(cumulative, _uniforms(rows, logits) * cumulative[:, -1:])
    # a parallel sum can step down by a rounding and so let a weight of 0 be hit
    possible = weights.gather(1, tokens) > 0
    return tokens.where(possible, weights.argmax(dim=-1, keepdim=True)).squeeze(1)


def _draw_filtered(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
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


def _weights(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Probabilities but for a factor, float32; summed up in float64, or the tail rounds away."""
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
