"""From sequences to the rows that are sampled, and their tokens on the way back."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lorikeet_engine.device.copies import Download
from lorikeet_engine.errors import EngineError, InvalidRequest, NotFinite
from lorikeet_engine.request import Request, TokenLogprobs
from lorikeet_engine.sampling.grammar import Bits, Grammars, Matcher
from lorikeet_engine.sampling.logprobs import Logprobs
from lorikeet_engine.sampling.sampler import NOT_FINITE, Sampler, SamplingRow
from lorikeet_engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step drew, by row. errors: of the rows that have no token."""

    tokens: list[int]
    logprobs: Mapping[int, TokenLogprobs]
    errors: Mapping[int, EngineError]


class Draws:
    """What a step draws, on its way to the host.

    drawn: its tokens on the device, [rows] int64; any for a row whose logits are not finite, since
    its sequence ends.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        tokens: torch.Tensor,
        logprobs: Logprobs | None,
        errors: Mapping[int, EngineError],
    ) -> None:
        self.drawn = tokens.clamp(min=0)
        self._sequences = sequences
        self._download = Download(tokens)
        self._logprobs = logprobs
        self._errors = errors

    def wait(self) -> SampledTokens:
        """Once everything is there. Raises what went wrong on the device meanwhile."""
        tokens = self._download.wait().tolist()
        logprobs = self._logprobs.read() if self._logprobs else {}
        errors = dict(self._errors)
        if NOT_FINITE in tokens:
            for row, token in enumerate(tokens):
                if token == NOT_FINITE:
                    errors.setdefault(row, _not_finite(self._sequences[row].request))
        return SampledTokens(tokens, logprobs, errors)


@torch.inference_mode()
def draw(
    sampler: Sampler,
    logits: torch.Tensor,
    sequences: list[Sequence],
    grammars: Grammars | None = None,
    before: torch.Tensor | None = None,
) -> Draws:
    """Draw the next token of each sequence from its row of logits [rows, vocab], which may change.

    before: the tokens of the step before, on the device, among them the sequences' pending ones.
    The host waits for nothing.
    """
    special = {i: sequence for i, sequence in enumerate(sequences) if not sequence.plain}
    allowed, errors = _allowed(grammars, special, logits.shape[-1])
    rows = [_row(sequence, allowed.get(i)) for i, sequence in enumerate(sequences)]
    wanted = {
        i: most for i, s in special.items() if (most := s.request.sampling.logprobs) is not None
    }
    logprobs = Logprobs(logits, wanted) if wanted else None
    tokens = sampler.sample(logits, rows, before)
    if logprobs is not None:
        logprobs.send(logits, tokens)
    return Draws(sequences, tokens, logprobs, errors)


def _row(sequence: Sequence, allowed: Bits | None) -> SamplingRow:
    params = sequence.request.sampling
    banned = tuple(sequence.stop_ids) if sequence.holds_on and allowed is None else ()
    if sequence.plain:
        return SamplingRow(params, sequence.seed, sequence.made, banned)
    row = SamplingRow(params, sequence.seed, sequence.made, banned, allowed=allowed)
    if not params.penalises:
        return row
    pending = sequence.pending[0] if sequence.pending else None
    return row._replace(made=sequence.tokens[sequence.prompt_length :], pending=pending)


def _allowed(
    grammars: Grammars | None, special: Mapping[int, Sequence], vocab: int
) -> tuple[dict[int, Bits], dict[int, EngineError]]:
    """By row, for those under a grammar: what they may say next, or why nothing."""
    bound = [(i, s, s.matcher) for i, s in special.items() if s.matcher is not None]
    if grammars is None or not bound:
        return {}, {}
    bits = np.zeros((len(bound), -(-vocab // 8)), np.uint8)
    problems = grammars.fill([matcher for _, _, matcher in bound], bits)
    errors: dict[int, EngineError] = {}
    for (i, sequence, matcher), mine, problem in zip(bound, bits, problems, strict=True):
        _mind_the_end(sequence, matcher, mine)
        if problem is not None:
            errors[i] = problem
        elif not mine.any():
            errors[i] = InvalidRequest("the grammar came to where no token can follow")
    return {i: b for (i, _, _), b in zip(bound, bits, strict=True) if i not in errors}, errors


def _mind_the_end(sequence: Sequence, matcher: Matcher, bits: Bits) -> None:
    """Stop ids may come where the answer may end, or as text, but for min_tokens.

    Where nothing else can come, min_tokens gives way.
    """
    stops = np.zeros_like(bits)
    for token in sequence.stop_ids:
        stops[token // 8] |= 1 << token % 8
    if sequence.holds_on:
        others = bits & ~stops
        if others.any():
            bits[:] = others
            return
    if matcher.may_end:
        bits |= stops


def _not_finite(request: Request) -> NotFinite:
    who = f"adapter {request.adapter}" if request.adapter else "the base model"
    return NotFinite(f"the logits of {who} are not finite: it overflows")
