"""A step on the device: its forward pass, the tokens sampled from it, and reading them back."""

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np
import torch

from lorikeet_engine.device.async_copies import Download
from lorikeet_engine.errors import EngineError, InvalidRequest, NotFinite
from lorikeet_engine.execution.batch_builder import build_step_input, group_by_adapter
from lorikeet_engine.execution.model_runner import ModelRunner
from lorikeet_engine.request import Request, TokenLogprobs
from lorikeet_engine.sampling.grammar import Grammars, Matcher, TokenBitmask, grammar_error
from lorikeet_engine.sampling.logprobs import Logprobs
from lorikeet_engine.sampling.sampler import NOT_FINITE, Sampler, SamplingRow
from lorikeet_engine.scheduling.sequence import Chunk, Sequence
from lorikeet_engine.scheduling.step_budget import ExpectedStep
from lorikeet_engine.scheduling.step_counters import StepLaunch
from lorikeet_engine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that a step sampled, by row. errors: of the rows that have no token."""

    tokens: list[int]
    logprobs: Mapping[int, TokenLogprobs]
    errors: Mapping[int, EngineError]

    def token(self, row: int) -> int:
        """A row's token. Raises its error if it has none."""
        if error := self.errors.get(row):
            raise error
        return self.tokens[row]

    def delivered(
        self, row: int, stop_ids: Set[int]
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """A row's token and its log probabilities for the caller, who gets no stop id."""
        if self.tokens[row] in stop_ids:
            return (), ()
        return (self.tokens[row],), (self.logprobs[row],) if row in self.logprobs else ()


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


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A step whose forward pass was launched: its chunks as laid out, and their logits.

    logits: [chunks that complete, vocab], on the device.
    """

    chunks: list[Chunk]
    logits: torch.Tensor
    launch: StepLaunch

    @property
    def sequences(self) -> list[Sequence]:
        """Those whose next token is sampled from it, by row."""
        return [chunk.sequence for chunk in self.chunks if chunk.completes]

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar restricts a token that is sampled from it."""
        return any(sequence.matcher is not None for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched and not read: its chunks as laid out, and the tokens it samples."""

    chunks: list[Chunk]
    sample: PendingSample
    launch: StepLaunch


def compute(
    runner: ModelRunner,
    chunks: list[Chunk],
    settings: EngineSettings,
    previous: InFlightStep | None,
    expected: ExpectedStep | None,
) -> ForwardPass:
    """Launch the forward pass of planned chunks; the host waits for nothing.

    previous: the step before if it is not read yet: its tokens are taken on the device.
    expected: StepLaunch's.
    """
    launched_s, chunks = time.perf_counter(), group_by_adapter(chunks)
    sampled = previous.sample.tokens if previous else None
    step_input = build_step_input(chunks, settings.page_size)
    batch = step_input.upload(torch.device(settings.device), sampled)
    logits = runner.forward(batch)
    launch = StepLaunch(launched_s, len(chunks), len(batch.segments or ()), expected)
    return ForwardPass(chunks, logits, launch)


@torch.inference_mode()
def sample(
    sampler: Sampler, forward: ForwardPass, grammars: Grammars | None = None
) -> InFlightStep:
    """Sample the next tokens from a forward pass, whose logits are changed in place.

    Grammars must have accepted the tokens of the step before. The host waits for nothing.
    """
    sequences, logits = forward.sequences, forward.logits
    special = {i: sequence for i, sequence in enumerate(sequences) if not sequence.plain_sampling}
    allowed, errors = _allowed(grammars, special, logits.shape[-1])
    for sequence in special.values():
        _count_tokens(sampler, sequence)
    rows = [_row(sequence, allowed.get(i)) for i, sequence in enumerate(sequences)]
    counts = {i: n for i, s in special.items() if (n := s.request.sampling.logprobs) is not None}
    logprobs = Logprobs(logits, counts) if counts else None
    tokens = sampler.sample(logits, rows)
    if logprobs is not None:
        logprobs.download(logits, tokens)
    pending = PendingSample(sequences, tokens, logprobs, errors)
    return InFlightStep(forward.chunks, pending, forward.launch)


def _count_tokens(sampler: Sampler, sequence: Sequence) -> None:
    """See that the device counts the sequence's tokens, if its logits depend on them."""
    params = sequence.request.sampling
    if params.changes_logits and sequence.penalty_slot is None and not sequence.ended:
        assert not sequence.pending_rows, "a token that nobody can count"
        at, tokens = sequence.prompt_length, sequence.tokens
        sequence.penalty_slot = sampler.penalties.begin(params, tokens[:at], tokens[at:])


def _row(sequence: Sequence, allowed: TokenBitmask | None) -> SamplingRow:
    params = sequence.request.sampling
    banned = tuple(sequence.stop_ids) if sequence.below_min_tokens and allowed is None else ()
    step, slot = sequence.output_length, sequence.penalty_slot
    return SamplingRow(params, sequence.seed, step, banned, slot, allowed)


def _allowed(
    grammars: Grammars | None, special: Mapping[int, Sequence], vocab: int
) -> tuple[dict[int, TokenBitmask], dict[int, EngineError]]:
    """The tokens that may follow in each row with a grammar, or the error of that row."""
    matched = [
        (i, s, s.matcher) for i, s in special.items() if s.matcher is not None and not s.ended
    ]
    if grammars is None or not matched:
        return {}, {}
    bitmasks = np.zeros((len(matched), -(-vocab // 8)), np.uint8)
    problems = _fill_bitmasks(grammars, matched, bitmasks)
    errors = {i: e for (i, _, _), e in zip(matched, problems, strict=True) if e is not None}
    allowed = {i: b for (i, _, _), b in zip(matched, bitmasks, strict=True) if i not in errors}
    return allowed, errors


def _fill_bitmasks(
    grammars: Grammars, matched: list[tuple[int, Sequence, Matcher]], bitmasks: TokenBitmask
) -> list[EngineError | None]:
    """Set the bits of the tokens that may follow; return what went wrong with each row.

    Where the grammars' own code breaks, rows are filled one by one: only those that break it fail.
    """
    try:
        problems = grammars.fill_bitmasks([matcher for _, _, matcher in matched], bitmasks)
        return [
            problem or _finish_bitmask(sequence, matcher, bitmask)
            for (_, sequence, matcher), bitmask, problem in zip(
                matched, bitmasks, problems, strict=True
            )
        ]
    except BaseException as error:  # as a panic in Rust is
        if len(matched) == 1:
            return [grammar_error(error, matched[0][1].request.request_id)]
    bitmasks[:] = 0
    return [
        problem
        for row, one in enumerate(matched)
        for problem in _fill_bitmasks(grammars, [one], bitmasks[row : row + 1])
    ]


def _finish_bitmask(
    sequence: Sequence, matcher: Matcher, bitmask: TokenBitmask
) -> InvalidRequest | None:
    """Set the bits of a row's stop ids; return an error if no token can follow then."""
    _set_stop_ids(sequence, matcher, bitmask)
    if bitmask.any():
        return None
    return InvalidRequest("the grammar came to where no token can follow")


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
