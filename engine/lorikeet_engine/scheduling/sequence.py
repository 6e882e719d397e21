"""One choice of a request on its way through the engine, and its share of one step."""

import time
from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.request import EngineTimings, FinishReason, Request
from lorikeet_engine.sampling.grammar import Matcher
from lorikeet_engine.sampling.penalties import PenaltySlot
from lorikeet_engine.scheduling.fairness import SequenceCost
from lorikeet_engine.scheduling.kv_cache import PageKeys, SequencePages, TokenIds


class SequenceStatus(Enum):
    """State of a sequence in the engine.

        WAITING ──► RUNNING ──► FINISHED
                     ▲   │
                     │   ▼
                   PREEMPTED

    WAITING: has not begun. Holds no KV pages.
    RUNNING: takes part in steps. The only state in which a sequence holds KV pages.
    PREEMPTED: waits to begin again and computes its tokens anew. Holds no KV pages.
    FINISHED: will never run again: complete, aborted or failed. Reached from every other state.
    """

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class AdapterLease(Protocol):
    """The right to use one adapter's slot on the GPU until it is released.

    Implemented by Lease (residency/gpu/adapters.py).
    """

    @property
    def slot(self) -> int:
        """The adapter's row in the table of LoraWeights."""

    @property
    def rank(self) -> int:
        """The adapter's largest rank."""

    @property
    def head_rank(self) -> int:
        """The rank of what it adds to lm_head, 0 for nothing."""

    @property
    def head_rows(self) -> int:
        """How many rows of lm_head it replaces."""

    @property
    def changes_experts(self) -> bool:
        """Whether it changes linears of experts."""

    def release(self) -> None:
        """Give it back; a second time does nothing."""


@dataclass(slots=True)
class OvertakeCount:
    """How many sequences with adapters began while others' adapters left no room for this one.

    count: until it was updated last. begun: how many had ever begun by then; None while the
    sequence waits for something else.
    """

    count: int = 0
    begun: int | None = None

    def update(self, begun: int) -> None:
        """Count those that began since the last update. begun: how many with adapters ever have."""
        if self.begun is not None:
            self.count += begun - self.begun
        self.begun = begun

    def pause(self) -> None:
        """Count nobody until the next update: something else keeps the sequence waiting."""
        self.begun = None


@dataclass(slots=True)
class SequenceTimings:
    """When a sequence reached each of its phases, by the monotonic clock.

    residency: where its adapter was when the request came; None without an adapter. requested_s:
    when the adapter was requested that was not on the GPU; loaded_s: when it came there. begun_s:
    when its first step was planned; cached_tokens: tokens of its prompt that were in the KV cache
    then. first_token_s: when its first token was read; last_token_s: when its newest was, by
    perf_counter. preemptions: how often it had to begin anew. steps: how many it took part in.
    """

    arrived_s: float = field(default_factory=time.monotonic)
    residency: Residency | None = None
    requested_s: float | None = None
    loaded_s: float | None = None
    begun_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0

    def engine_timings(self) -> EngineTimings:
        """The time of each phase until now, when the sequence's newest token has been read."""
        now_s = time.monotonic()
        assert self.begun_s is not None, "a token of no step"
        if self.first_token_s is None:
            self.first_token_s = now_s
        load_s = 0.0
        if self.loaded_s is not None and self.requested_s is not None:
            load_s = self.loaded_s - self.requested_s
        queued_s = self.begun_s - self.arrived_s
        return EngineTimings(
            queued_s=queued_s,
            load_s=min(max(load_s, 0.0), queued_s),
            prefill_s=self.first_token_s - self.begun_s,
            decode_s=now_s - self.first_token_s,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            steps=self.steps,
        )


class Sequence:
    """The tokens of one choice, prompt and output, and what it holds while it runs.

    arrival: its number in the order of arrival. max_tokens: the request's, cut to the context.
    stop_ids: tokens that end it. seed: the choice's own. compiled: its grammar, as a matcher that
    others share; None without one. matcher: its own, set once that is there, which has accepted
    every token in `tokens`. plain_sampling: it has no grammar, no penalties, biases or logprobs.
    tokens: those that the host has, the request's own prompt until one is added: of a long prompt a
    hundred choices may wait. pending_rows: for each token that is sampled and not read yet,
    its row in the step that samples it. forced: tokens that must follow the pending one, known
    before it is read. length: how many all of these are together. decode_tokens: how many its next
    step computes if it decodes: the last sampled one, and those that were forced behind it.
    kv: its KV pages. lease: its adapter's. penalty_slot: where the device counts its tokens, from
    the first that is sampled since it runs; None if nothing changes its logits. copy_s: how long
    the adapter's copy to the GPU takes if no request asked for it before. cost: what its tenant
    pays, set when it begins to wait.
    """

    cost: SequenceCost

    def __init__(
        self,
        request: Request,
        choice: int,
        *,
        arrival: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        seed: int,
        prompt_keys: PageKeys,
        compiled: "Future[Matcher] | None" = None,
    ) -> None:
        self.request = request
        self.choice = choice
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.seed = seed
        self.compiled = compiled
        self.matcher: Matcher | None = None
        sampling = request.sampling
        special = sampling.changes_logits or sampling.logprobs is not None
        self.plain_sampling = compiled is None and not special
        self.prompt = request.prompts[choice // request.n]
        self.tokens: TokenIds = self.prompt
        self.pending_rows: list[int] = []
        self.forced: tuple[int, ...] = ()
        self.decode_tokens = 1
        self.prompt_length = self.length = len(self.tokens)
        self.kv = SequencePages(self.tokens, prompt_keys)
        first_of_prompt = choice % request.n == 0
        if sampling.prompt_logprobs is not None and first_of_prompt and self.prompt_length > 1:
            self.kv.score_from = 0
        self.lease: AdapterLease | None = None
        self.penalty_slot: PenaltySlot | None = None
        self.copy_s = 0.0
        self.overtakes = OvertakeCount()
        self.timings = SequenceTimings()
        self.status = SequenceStatus.WAITING

    @property
    def adapter(self) -> AdapterRef | None:
        """The adapter it runs under, None for the base model alone."""
        return self.request.adapter

    @property
    def output_length(self) -> int:
        """How many tokens have been sampled for it, or were forced."""
        return self.length - self.prompt_length

    @property
    def awaits_adapter(self) -> bool:
        """Whether the sequence has an adapter and no lease of it yet."""
        return self.lease is None and self.request.adapter is not None

    @property
    def complete(self) -> bool:
        """Whether all its tokens have been sampled; the last may still be pending."""
        return self.length - self.prompt_length == self.max_tokens

    @property
    def below_min_tokens(self) -> bool:
        """Whether its output is still shorter than min_tokens."""
        return self.output_length < self.request.sampling.min_tokens

    @property
    def remaining(self) -> int:
        """Tokens still to be computed before the next can be sampled."""
        return self.length - self.kv.computed

    @property
    def decodes(self) -> bool:
        """Whether all that is still to be computed came with its last sampled token."""
        return self.length - self.kv.computed <= self.decode_tokens

    @property
    def to_score(self) -> int:
        """Tokens of its prompt behind which the next one is still to be scored."""
        start = self.kv.score_from
        return 0 if start is None else self.prompt_length - 1 - start

    def score(self, chunk: "Chunk") -> "ScoredRows":
        """Note that a step computes this chunk; return what of the prompt it is to score.

        Nothing, as far as a chunk computes anew what was scored before a preemption.
        """
        assert self.kv.score_from is not None, "all is scored"
        start, last = self.kv.score_from, self.prompt_length - 1
        end = max(start, min(chunk.end, last))
        self.kv.score_from = end if end < last else None
        return ScoredRows(self, start, end)

    def release(self) -> None:
        """Give back its adapter's lease and its penalty slot; what is computed anew is a prompt."""
        self.decode_tokens = 1
        if self.lease is not None:
            self.lease.release()
            self.lease = None
        self._release_penalty_slot()

    def add_pending(self, row: int, forced: tuple[int, ...] = ()) -> None:
        """Note that the next token is sampled in this row of the step that was just launched.

        forced: the tokens after it, as far as its grammar leaves no choice.
        """
        self.pending_rows.append(row)
        self.forced, self.decode_tokens = forced, 1 + len(forced)
        self.length += self.decode_tokens
        if self.complete:  # nothing more is sampled for it, and others may run in its place
            self._release_penalty_slot()

    def accept(self, token: int) -> FinishReason | None:
        """Take the first pending token, which was read, and what was forced behind it.

        A stop id ends it and is not kept. Raises InvalidRequest if its grammar cannot go on.
        """
        if token in self.stop_ids:
            self.pending_rows.clear()
            self.length = len(self.tokens)
            return FinishReason.STOP
        del self.pending_rows[0]
        accepted, self.forced = (token, *self.forced), ()
        if isinstance(self.tokens, tuple):
            self.tokens = self.kv.tokens = list(self.tokens)
        self.tokens.extend(accepted)
        if self.matcher is not None:
            for each in accepted:
                self.matcher.accept(each)
            if self.matcher.must_end:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.complete and not self.pending_rows else None

    def _release_penalty_slot(self) -> None:
        if self.penalty_slot is not None:
            self.penalty_slot.release()
            self.penalty_slot = None


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a sequence, which one step computes.

    completes: whether the sequence's next token is sampled from them. pages: SequencePages', when
    the step was planned; once preempted it gets others.
    """

    sequence: Sequence
    start: int
    end: int
    completes: bool
    pages: "list[array[int]]"

    @classmethod
    def of(cls, sequence: Sequence, max_tokens: int) -> "Chunk":
        """The sequence's next uncomputed tokens, at most max_tokens of them."""
        kv, total = sequence.kv, sequence.length
        end = kv.computed + max_tokens
        if end < total:
            return cls(sequence, kv.computed, end, False, kv.pages)
        return cls(sequence, kv.computed, total, True, kv.pages)

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self.end - self.start


class ScoredRows(NamedTuple):
    """Tokens `start` to `end` of a prompt, whose logits say how likely the tokens after them are.

    They belong to a chunk of one step.
    """

    sequence: Sequence
    start: int
    end: int

    @property
    def next_tokens(self) -> list[int]:
        """The tokens after them."""
        return list(self.sequence.tokens[self.start + 1 : self.end + 1])

    @property
    def alternatives(self) -> int:
        """How many of the most likely tokens to report beside each of those."""
        return self.sequence.request.sampling.prompt_logprobs or 0
