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
    """Right to use one adapter's slot on the GPU until it is released.

    Implemented by Lease (residency/gpu/adapters.py).
    """

    @property
    def slot(self) -> int:
        """Adapter's row in the table of LoraWeights."""

    @property
    def rank(self) -> int:
        """Largest rank of the adapter."""

    @property
    def head_rank(self) -> int:
        """Rank of the adapter on lm_head; 0 for none."""

    @property
    def head_rows(self) -> int:
        """Number of lm_head's rows that the adapter replaces."""

    @property
    def changes_experts(self) -> bool:
        """Whether the adapter changes linears of experts."""

    def release(self) -> None:
        """Give the lease back; a second call does nothing."""


@dataclass(slots=True)
class OvertakeCount:
    """Number of sequences with adapters that have overtaken a sequence held up by other adapters.

    count: number at the last update.
    begun: sequences with adapters that had ever begun by the last update; None while the sequence
        waits for something else.
    """

    count: int = 0
    begun: int | None = None

    def update(self, begun: int) -> None:
        """Count the sequences that have begun since the last update.

        begun: sequences with adapters that have ever begun.
        """
        if self.begun is not None:
            self.count += begun - self.begun
        self.begun = begun

    def pause(self) -> None:
        """Count none until the next update: the sequence waits for something else."""
        self.begun = None


@dataclass(slots=True)
class SequenceTimings:
    """Times at which a sequence reached each of its phases, by the monotonic clock.

    residency: adapter's tier when the request came; None without an adapter.
    requested_s: when the adapter was requested, if it was not on the GPU.
    loaded_s: when the adapter came to the GPU.
    begun_s: when the first step was planned.
    first_token_s: when the first token was read.
    last_token_s: when the newest token was read, by perf_counter.
    cached_tokens: prompt tokens found in the KV cache when the sequence first began.
    preemptions: times that the sequence was preempted.
    steps: steps that the sequence took part in.
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
        """Return the duration of each phase until now, when the newest token has been read."""
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
    """Tokens of one choice, prompt and output, and the resources held for them.

    arrival: number in the order of arrival.
    max_tokens: the request's, cut to the context.
    stop_ids: tokens that end the sequence.
    seed: seed of this choice.
    compiled: compiled grammar, shared with other choices; None without a grammar.
    matcher: the sequence's own copy of `compiled`; has accepted every token in `tokens`.
    plain_sampling: whether there are no grammar, penalties, biases and logprobs.
    tokens: tokens known to the host. The request's own tuple until a token is added, so that a
        hundred waiting choices share one long prompt.
    pending_rows: row in its step of each token that is sampled but not read yet.
    forced: tokens that must follow the pending token, known before that is read.
    length: number of tokens, pending and forced ones included.
    decode_tokens: tokens that the next decode computes: the last sampled one and the forced ones.
    kv: KV pages.
    lease: lease of the adapter.
    penalty_slot: device counters of the tokens since the sequence runs; None if no penalty or bias
        changes the logits.
    copy_s: seconds that the adapter's copy to the GPU takes; 0 if requested before.
    cost: cost charged to the tenant; set when the sequence is added to the scheduler.
    status: changed by the scheduler, and by the request queue before that.
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
        """Adapter that the sequence runs under; None for the base model alone."""
        return self.request.adapter

    @property
    def output_length(self) -> int:
        """Number of tokens sampled or forced so far."""
        return self.length - self.prompt_length

    @property
    def awaits_adapter(self) -> bool:
        """Whether the sequence has an adapter but no lease of it yet."""
        return self.lease is None and self.request.adapter is not None

    @property
    def complete(self) -> bool:
        """Whether all tokens have been sampled; the last may still be pending."""
        return self.length - self.prompt_length == self.max_tokens

    @property
    def below_min_tokens(self) -> bool:
        """Whether the output is still shorter than min_tokens."""
        return self.output_length < self.request.sampling.min_tokens

    @property
    def remaining(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return self.length - self.kv.computed

    @property
    def decodes(self) -> bool:
        """Whether only the last sampled token and its forced ones are still to be computed."""
        return self.length - self.kv.computed <= self.decode_tokens

    @property
    def to_score(self) -> int:
        """Number of prompt tokens whose next token is still to be scored."""
        start = self.kv.score_from
        return 0 if start is None else self.prompt_length - 1 - start

    def score(self, chunk: "Chunk") -> "ScoredRows":
        """Record that a step computes this chunk; return its rows that are to be scored.

        No rows are returned for tokens that were scored before a preemption.
        """
        assert self.kv.score_from is not None, "all is scored"
        start, last = self.kv.score_from, self.prompt_length - 1
        end = max(start, min(chunk.end, last))
        self.kv.score_from = end if end < last else None
        return ScoredRows(self, start, end)

    def release(self) -> None:
        """Give back the adapter's lease and the penalty slot.

        Tokens that are computed again count as a prompt.
        """
        self.decode_tokens = 1
        if self.lease is not None:
            self.lease.release()
            self.lease = None
        self._release_penalty_slot()

    def add_pending(self, row: int, forced: tuple[int, ...] = ()) -> None:
        """Record that the next token is sampled in this row of the step that was just launched.

        forced: tokens after the sampled one, as far as the grammar leaves no choice.
        """
        self.pending_rows.append(row)
        self.forced, self.decode_tokens = forced, 1 + len(forced)
        self.length += self.decode_tokens
        if self.complete:  # nothing more is sampled, and another sequence may take the slot
            self._release_penalty_slot()

    def accept(self, token: int) -> FinishReason | None:
        """Add the first pending token, now read, and the tokens forced after it.

        A stop id ends the sequence and is not added. Raises InvalidRequest if the grammar cannot go
        on.
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
    """Tokens `start` to `end` of a sequence, computed in one step.

    completes: whether the sequence's next token is sampled from the chunk.
    pages: SequencePages.pages when the step was planned; a preempted sequence gets others.
    """

    sequence: Sequence
    start: int
    end: int
    completes: bool
    pages: "list[array[int]]"

    @classmethod
    def of(cls, sequence: Sequence, max_tokens: int) -> "Chunk":
        """Make a chunk of the sequence's next uncomputed tokens, at most max_tokens."""
        kv, total = sequence.kv, sequence.length
        end = kv.computed + max_tokens
        if end < total:
            return cls(sequence, kv.computed, end, False, kv.pages)
        return cls(sequence, kv.computed, total, True, kv.pages)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.end - self.start


class ScoredRows(NamedTuple):
    """Tokens `start` to `end` of a prompt, whose logits score the tokens that follow each of them.

    All of them belong to one chunk.
    """

    sequence: Sequence
    start: int
    end: int

    @property
    def next_tokens(self) -> list[int]:
        """Tokens that follow each of `start` to `end`."""
        return list(self.sequence.tokens[self.start + 1 : self.end + 1])

    @property
    def alternatives(self) -> int:
        """Number of most likely tokens to report beside each next token."""
        return self.sequence.request.sampling.prompt_logprobs or 0
