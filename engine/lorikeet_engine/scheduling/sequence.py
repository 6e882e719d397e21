"""One choice of a request on its way through the engine, and its share of one step."""

import time
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.request import Course, FinishReason, Request
from lorikeet_engine.sampling.grammar import Matcher
from lorikeet_engine.scheduling.fairness import Bill
from lorikeet_engine.scheduling.kv_cache import SequencePages


class AdapterLease(Protocol):
    """The right to use one adapter's slot on the GPU until it is released."""

    @property
    def slot(self) -> int:
        """The adapter's row in the table of LoraWeights."""

    @property
    def rank(self) -> int:
        """The adapter's largest rank."""

    def release(self) -> None:
        """Give it back; a second time does nothing."""


@dataclass(slots=True)
class Progress:
    """What a sequence has gone through so far; times by the monotonic clock.

    found: where its adapter was when the request came. came_cold: whether it was not on the GPU
    when the sequence began to wait; loaded_s: when it came.
    begun_s: when its first step was planned; cached_tokens: of its prompt, found computed then.
    first_s: when its first token was known. told_s: when its last one was, by perf_counter.
    preemptions: how often it had to begin anew. steps: it took part in.
    """

    arrived_s: float = field(default_factory=time.monotonic)
    found: Residency | None = None
    came_cold: bool = False
    loaded_s: float | None = None
    begun_s: float | None = None
    first_s: float | None = None
    told_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0

    def course(self) -> Course:
        """All of it until now, when the sequence's newest token has become known."""
        now_s = time.monotonic()
        assert self.begun_s is not None, "a token of no step"
        if self.first_s is None:
            self.first_s = now_s
        load_s = self.loaded_s - self.arrived_s if self.loaded_s is not None else 0.0
        queued_s = self.begun_s - self.arrived_s
        return Course(
            queued_s=queued_s,
            load_s=min(max(load_s, 0.0), queued_s),
            prefill_s=self.first_s - self.begun_s,
            decode_s=now_s - self.first_s,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            steps=self.steps,
        )


@dataclass(slots=True)
class KeptOut:
    """How many sequences with adapters have begun while others' adapters kept one out.

    overtaken: until it was looked at last. since: of all that ever began had by then; None where
    it is something else that keeps it out.
    """

    overtaken: int = 0
    since: int | None = None

    def again(self, begun: int) -> None:
        """Others keep it out still. begun: how many with adapters ever have."""
        if self.since is not None:
            self.overtaken += begun - self.since
        self.since = begun


class Sequence:
    """The tokens of one choice, prompt and made, and what it holds while it runs.

    arrival: its number in the order of arrival. max_tokens: the request's, cut to the context.
    stop_ids: tokens that end it. seed: the choice's own. matcher: of its grammar, told of every
    token that is known. plain: it has no grammar, no penalties, and tells no logprobs.
    tokens: those that are known. pending: of each that was drawn behind them and is not known yet,
    the row of the step that drew it. length: how many both are.
    kv: its KV pages. lease: its adapter's. bill: its tenant's, set when it begins to wait.
    ended: it will never run again.
    """

    bill: Bill

    def __init__(
        self,
        request: Request,
        choice: int,
        *,
        arrival: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        seed: int,
        page_size: int,
        matcher: Matcher | None = None,
    ) -> None:
        self.request = request
        self.choice = choice
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.seed = seed
        self.matcher = matcher
        sampling = request.sampling
        self.plain = matcher is None and sampling.logprobs is None and not sampling.penalises
        self.tokens = list(request.prompts[choice // request.n])
        self.pending: list[int] = []
        self.prompt_length = self.length = len(self.tokens)
        digest = request.adapter.digest if request.adapter else None
        self.kv = SequencePages(self.tokens, page_size, request.salt, digest)
        self.lease: AdapterLease | None = None
        self.kept_out = KeptOut()
        self.progress = Progress()
        self.ended = False

    @property
    def adapter(self) -> AdapterRef | None:
        """The adapter it runs under, None for the base model alone."""
        return self.request.adapter

    @property
    def made(self) -> int:
        """How many tokens have been drawn for it."""
        return self.length - self.prompt_length

    @property
    def awaits_adapter(self) -> bool:
        """Whether it waits for its adapter, if for nothing else."""
        return self.lease is None and self.request.adapter is not None

    @property
    def complete(self) -> bool:
        """Whether all its tokens have been drawn; the last may still be pending."""
        return self.length - self.prompt_length == self.max_tokens

    @property
    def holds_on(self) -> bool:
        """Whether it has yet to make its min_tokens."""
        return self.made < self.request.sampling.min_tokens

    @property
    def awaits_token(self) -> bool:
        """Whether its grammar must hear its last token before the next one can be drawn."""
        return self.matcher is not None and bool(self.pending)

    @property
    def remaining(self) -> int:
        """Tokens still to be computed before the next can be drawn: 1 means that it decodes."""
        return self.length - self.kv.computed

    def draw(self, row: int) -> None:
        """The step at hand draws its next token in this row."""
        self.pending.append(row)
        self.length += 1

    def accept(self, token: int) -> FinishReason | None:
        """Learn the first pending token; a stop id ends it and is not kept.

        Raises InvalidRequest where its grammar cannot be followed on.
        """
        if token in self.stop_ids:
            self.pending.clear()
            self.length = len(self.tokens)
            return FinishReason.STOP
        del self.pending[0]
        self.tokens.append(token)
        if self.matcher is not None:
            self.matcher.accept(token)
            if self.matcher.must_end:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.complete and not self.pending else None


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a sequence: its share of one step.

    completes: whether its next token is drawn from them. pages: the sequence's when the step was
    planned; a preempted sequence has others.
    """

    sequence: Sequence
    start: int
    end: int
    completes: bool
    pages: "array[int]"

    @classmethod
    def of(cls, sequence: Sequence, most: int) -> "Chunk":
        """Its next uncomputed tokens, `most` of them at most."""
        kv, total = sequence.kv, sequence.length
        end = kv.computed + most
        if end < total:
            return cls(sequence, kv.computed, end, False, kv.pages)
        return cls(sequence, kv.computed, total, True, kv.pages)

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self.end - self.start
