"""Samples a step's tokens: makes sampling rows of its sequences, and reads the tokens back."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lorikeet_engine.device.async_copies import Download
from lorikeet_engine.errors import EngineError, InvalidRequest, NotFinite
from lorikeet_engine.request import Request, TokenLogprobs
from lorikeet_engine.sampling.grammar import Grammars, Matcher, TokenBitmask
from lorikeet_engine.sampling.logprobs import Logprobs
from lorikeet_engine.sampling.sampler import NOT_FINITE, Sampler, SamplingRow
from lorikeet_engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that a step sampled, by row. errors: of the rows that have no token."""

    tokens: list[int]
    logprobs: Mapping[int, TokenLogprobs]
    errors: Mapping[int, EngineError]


class PendingSample:
    """The tokens that a step samples, on their way to the host.

    tokens: on the device, [rows] int64; arbitrary in a row whose logits are not finite, since its
    sequence ends.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        tokens: torch.Tensor,
        logprobs: Logprobs | None,
        errors: Mapping[int, EngineError],
    ) -> None:
        self.tokens = tokens.clamp(min=0)
        self._sequences = sequences
        self._download = Download(tokens)
        self._logprobs = logprobs
        self._errors = errors

    def wait(self) -> SampledTokens:
        """The tokens once they are on the host. Raises what went wrong on the device meanwhile."""
        tokens = self._download.wait().tolist()
        logprobs = self._logprobs.read() if self._logprobs else {}
        errors = dict(self._errors)
        if NOT_FINITE in tokens:
            for row, token in enumerate(tokens):
                if token == NOT_FINITE:
                    errors.setdefault(row, _not_finite(self._sequences[row].request))
        return SampledTokens(tokens, logprobs, errors)


@torch.inference_mode()
def sample_sequences(
    sampler: Sampler,
    logits: torch.Tensor,
    sequences: list[Sequence],
    grammars: Grammars | None = None,
    previous: torch.Tensor | None = None,
) -> PendingSample:
    """Sample each sequence's next token from its row of logits [rows, vocab], changed in place.

    previous: the tokens of the step before, on the device, among them the sequences' pending ones.
    The host waits for nothing.
    """
    special = {i: sequence for i, sequence in enumerate(sequences) if not sequence.plain_sampling}
    allowed, errors = _allowed(grammars, special, logits.shape[-1])
    rows = [_row(sequence, allowed.get(i)) for i, sequence in enumerate(sequences)]
    counts = {i: n for i, s in special.items() if (n := s.request.sampling.logprobs) is not None}
    logprobs = Logprobs(logits, counts) if counts else None
    tokens = sampler.sample(logits, rows, previous)
    if logprobs is not None:
        logprobs.download(logits, tokens)
    return PendingSample(sequences, tokens, logprobs, errors)


def _row(sequence: Sequence, allowed: TokenBitmask | None) -> SamplingRow:
    params = sequence.request.sampling
    banned = tuple(sequence.stop_ids) if sequence.below_min_tokens and allowed is None else ()
    if sequence.plain_sampling:
        return SamplingRow(params, sequence.seed, sequence.output_length, banned)
    row = SamplingRow(params, sequence.seed, sequence.output_length, banned, allowed=allowed)
    if not params.has_penalties:
        return row
    pending_row = sequence.pending_rows[0] if sequence.pending_rows else None
    return row._replace(output=sequence.tokens[sequence.prompt_length :], pending_row=pending_row)


def _allowed(
    grammars: Grammars | None, special: Mapping[int, Sequence], vocab: int
) -> tuple[dict[int, TokenBitmask], dict[int, EngineError]]:
    """The tokens that may follow in each row with a grammar, or the error of that row."""
    matched = [(i, s, s.matcher) for i, s in special.items() if s.matcher is not None]
    if grammars is None or not matched:
        return {}, {}
    bitmasks = np.zeros((len(matched), -(-vocab // 8)), np.uint8)
    problems = grammars.fill_bitmasks([matcher for _, _, matcher in matched], bitmasks)
    errors: dict[int, EngineError] = {}
    for (i, sequence, matcher), bitmask, problem in zip(matched, bitmasks, problems, strict=True):
        _set_stop_ids(sequence, matcher, bitmask)
        if problem is not None:
            errors[i] = problem
        elif not bitmask.any():
            errors[i] = InvalidRequest("the grammar came to where no token can follow")
    allowed = {i: b for (i, _, _), b in zip(matched, bitmasks, strict=True) if i not in errors}
    return allowed, errors


def _set_stop_ids(sequence: Sequence, matcher: Matcher, bitmask: TokenBitmask) -> None:
    """Allow stop ids where the output may end, and forbid them below min_tokens.

    Below min_tokens they stay allowed where nothing else can follow.
    """
    stops = np.zeros_like(bitmask)
    for token in sequence.stop_ids:
        stops[token // 8] |= 1 << token % 8
    if sequence.below_min_tokens:
        others = bitmask & ~stops
        if others.any():
            bitmask[:] = others
            return
    if matcher.may_end:
        bitmask |= stops


def _not_finite(request: Request) -> NotFinite:
    source = f"adapter {request.adapter}" if request.adapter else "the base model"
    return NotFinite(f"the logits of {source} are not finite: it overflows")
