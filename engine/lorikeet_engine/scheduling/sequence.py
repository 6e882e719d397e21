"""Sequence: one choice of a request, from its arrival to its end.

Chunk: the tokens of a sequence that one step computes.
"""

import time
from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

import numpy as np

from lorikeet_engine.adapter import Pooling, Residency
from lorikeet_engine.request import (
    DraftCounts,
    DraftSource,
    EngineTimings,
    FinishReason,
    MemberLoad,
    Request,
)
from lorikeet_engine.sampling.grammar import Matcher
from lorikeet_engine.sampling.penalties import PenaltySlot
from lorikeet_engine.scheduling.fairness import SequenceCost
from lorikeet_engine.scheduling.kv_cache import (
    PageKeys,
    SequencePages,
    StateUse,
    TokenIds,
)
from lorikeet_engine.scheduling.prompt_lookup import PromptLookup
from lorikeet_engine.scheduling.recent_answers import AdapterAnswers, Key


class SequenceStatus(Enum):
    """State of a sequence in the engine.

        WAITING ──► RUNNING ──► FINISHED
                     ▲   │
                     │   ▼
                   PREEMPTED

    WAITING: has not begun. Holds no KV pages. The first state, except of a sequence that goes on
        from tokens of another engine.
    RUNNING: takes part in steps. The only state in which a sequence holds KV pages.
    PREEMPTED: waits to run again, and then computes again its tokens whose pages are no longer
        cached. Holds no KV pages. The first state of a sequence that goes on from tokens of another
        engine.
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
        """Index of the adapter in the tables of adapters on the GPU."""

    @property
    def rank(self) -> int:
        """Largest LoRA rank of the adapter on any linear."""

    @property
    def head_rank(self) -> int:
        """LoRA rank of the adapter on lm_head; 0 if it has no LoRA there."""

    @property
    def head_rows(self) -> int:
        """Number of rows of lm_head that the adapter replaces with trained rows."""

    @property
    def changes_experts(self) -> bool:
        """Whether the adapter changes linears of experts."""

    @property
    def has_vectors(self) -> bool:
        """Whether the adapter has vectors for linears, as DoRA has."""

    @property
    def composed(self) -> bool:
        """Whether the slot holds a composition: a weighted sum of several adapters."""

    def release(self) -> None:
        """Return the lease, so that the adapter may be evicted; a second call does nothing."""


@dataclass(slots=True)
class OvertakeCount:
    """Number of sequences with adapters that have overtaken a waiting sequence.

    Sequences are counted only while other adapters keep the waiting sequence from beginning.

    count: the number at the last update.
    begun: number of all sequences with adapters that the engine had begun by the last update; the
        next update counts those begun after it. None while anything else keeps the sequence
        waiting.
    """

    count: int = 0
    begun: int | None = None

    def update(self, begun: int) -> None:
        """Add the sequences with adapters that have begun since the last update.

        begun: number of sequences with adapters that have begun since the engine's start.
        """
        if self.begun is not None:
            self.count += begun - self.begun
        self.begun = begun

    def pause(self) -> None:
        """Stop counting until the next update: the sequence now waits for another reason."""
        self.begun = None


@dataclass(slots=True)
class SequenceTimings:
    """Times at which a sequence reached each of its phases, by the monotonic clock.

    residency: tier that held the adapter when the request came; None without an adapter.
    requested_s: time at which the adapter was requested; None if it was on the GPU, or without an
        adapter.
    loaded_s: time at which the adapter was loaded to the GPU.
    begun_s: time at which the sequence's first step was planned.
    first_token_s: time at which the host read the first token.
    last_token_s: time at which the host read the latest token, by perf_counter.
    cached_tokens: prompt tokens found in the KV cache when the sequence first began.
    host_tokens: those of the cached tokens whose pages came from host memory.
    preemptions: number of times that the sequence was preempted.
    steps: number of steps that the sequence took part in.
    drafts: numbers of verified and of accepted drafted tokens, by the text in which they were
        found (the sequence itself or recent answers); empty without any.
    member_tiers, members_loaded_s: like residency and loaded_s, for each adapter of a composition.
    """

    arrived_s: float = field(default_factory=time.monotonic)
    residency: Residency | None = None
    requested_s: float | None = None
    loaded_s: float | None = None
    begun_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int = 0
    host_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    drafts: dict[DraftSource, DraftCounts] = field(default_factory=dict)
    member_tiers: tuple[Residency, ...] = ()
    members_loaded_s: tuple[float, ...] = ()

    def engine_timings(self) -> EngineTimings:
        """Return the durations of all phases up to now; call it when the latest token has just been
        read.
        """
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
            host_tokens=self.host_tokens,
            preemptions=self.preemptions,
            steps=self.steps,
            drafts=tuple(self.drafts.values()),
            members=self._member_loads(queued_s) if self.member_tiers else (),
        )

    def _member_loads(self, queued_s: float) -> tuple[MemberLoad, ...]:
        since_s = self.begun_s if self.requested_s is None else self.requested_s
        assert since_s is not None, "a token of no step"
        pairs = zip(self.member_tiers, self.members_loaded_s, strict=True)
        return tuple(MemberLoad(t, min(max(at_s - since_s, 0.0), queued_s)) for t, at_s in pairs)


class Sequence:
    """Tokens of one choice, prompt and output, and the resources held for them.

    A forced token is the only one that the grammar allows: it is computed without being sampled.
    A drafted token is a predicted one, accepted if the token sampled in its place is the same.

    choice: index of the choice in its request.
    arrival: number of the sequence in the order of arrival.
    max_tokens: maximum number of output tokens: the request's max_tokens, cut to the context.
    stop_ids: token ids that end the sequence.
    seed: seed of this choice.
    compiled: compiled grammar, shared with other choices; None without a grammar.
    matcher: the sequence's own copy of `compiled`; has accepted every token of the output in
        `tokens`.
    plain_sampling: whether the sequence has no grammar, penalties, biases or log probabilities.
    tokens: tokens that the host knows; the request's own tuple until a token is added, so that a
        hundred waiting choices share one long prompt.
    pending_rows: for each token that was sampled but not read yet, its row in its step's logits.
    forced: forced tokens after the pending token, known before that token is read.
    length: number of tokens, pending and forced ones included.
    decode_tokens: number of tokens that the next decode computes: the last sampled token and the
        forced tokens.
    awaits_read: whether the sequence takes part in no step until the host has read its pending
        token, because this step verifies drafted tokens, or because drafts depend on the token.
    lookup: predicts next tokens, for drafts; None before the first use.
    drafted_from: source of the latest draft.
    kv: KV pages of the sequence.
    adapter: adapter that changes the sequence's tokens; None for the base model alone, also if the
        prompt does not have the invocation tokens of the request's activated LoRA.
    active_from: position of the first token that the adapter changes; 0 without an adapter.
    lease: lease of the adapter; None if the sequence holds none.
    pooled: sum of the hidden states that the host has read, [hidden] float64, for a mean; None
        before the first.
    penalty_slot: device counters of the sequence's tokens while it runs; None if no penalty or bias
        changes the logits.
    copy_s: seconds that the adapter's copy to the GPU takes; 0 if the adapter was requested before.
    overtakes: number of sequences with adapters that began before this sequence, while other
        adapters kept this sequence waiting.
    cost: cost of computing the sequence, which its tenant's counter gets; set when the sequence is
        added to the scheduler.
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
        made: tuple[int, ...] | None = None,
    ) -> None:
        """Create a sequence that holds nothing yet.

        made: output tokens of another engine, from which the sequence goes on; None for a new one.
        """
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
        self.tokens: TokenIds = [*self.prompt, *made] if made else self.prompt
        self.pending_rows: list[int] = []
        self.forced: tuple[int, ...] = ()
        self.decode_tokens = 1
        self.awaits_read = False
        self.lookup: PromptLookup | None = None
        self.drafted_from = DraftSource.LOOKUP
        self.prompt_length, self.length = len(self.prompt), len(self.tokens)
        params = request.scheduling
        self.kv = SequencePages(
            self.tokens, prompt_keys, params.tenant, background=params.background
        )
        self.adapter = None if prompt_keys.adapter_digest is None else request.adapter
        self.active_from = prompt_keys.active_from
        scored = made is None and choice % request.n == 0
        if sampling.prompt_logprobs is not None and scored and self.prompt_length > 1:
            self.kv.score_from = 0
        if request.pools is Pooling.MEAN:
            self.kv.score_from = 0
        self.pooled: np.ndarray | None = None
        self.lease: AdapterLease | None = None
        self.penalty_slot: PenaltySlot | None = None
        self.copy_s = 0.0
        self.overtakes = OvertakeCount()
        self.timings = SequenceTimings()
        self.status = SequenceStatus.WAITING if made is None else SequenceStatus.PREEMPTED

    @property
    def output_length(self) -> int:
        """Number of tokens sampled or forced so far."""
        return self.length - self.prompt_length

    @property
    def has_own_output(self) -> bool:
        """Whether this engine has sampled a token of the output."""
        return self.timings.first_token_s is not None or bool(self.pending_rows)

    @property
    def awaits_adapter(self) -> bool:
        """Whether the sequence has an adapter but no lease of it yet."""
        return self.lease is None and self.adapter is not None

    @property
    def complete(self) -> bool:
        """Whether max_tokens output tokens have been sampled or forced, read by the host or not.

        An end by a stop token is known only once the host has read the token.
        """
        return self.length - self.prompt_length == self.max_tokens

    @property
    def background(self) -> bool:
        """Whether the request is in the background: it gets only what foreground requests leave."""
        return self.request.scheduling.background

    @property
    def answers_key(self) -> Key:
        """Tenant, salt and adapter digest: key of recent answers to like requests, for drafts."""
        adapter = None if self.adapter is None else self.adapter.digest
        return self.request.scheduling.tenant, self.request.salt, adapter

    def begin_lookup(self, answers: AdapterAnswers) -> PromptLookup:
        """Create `lookup`, which predicts the sequence's next tokens for drafts, and return it.

        answers: recent answers to the same tenant with the same adapter.
        """
        left = self.prompt_length + self.max_tokens - len(self.tokens)
        self.lookup = PromptLookup(self.tokens, left, answers)
        return self.lookup

    @property
    def remaining(self) -> int:
        """Number of tokens that must be computed before the next token can be sampled."""
        return self.length - self.kv.computed

    @property
    def decodes(self) -> bool:
        """Whether only the last sampled token and the tokens forced after it remain to be
        computed.
        """
        return self.length - self.kv.computed <= self.decode_tokens

    @property
    def to_score(self) -> int:
        """Number of prompt tokens whose logits are still needed to score the token after them."""
        start = self.kv.score_from
        if start is None or self.request.pools is not None:
            return 0
        return self.prompt_length - 1 - start

    def score(self, chunk: "Chunk") -> "ScoredRows":
        """Record that a step computes this chunk; return the prompt tokens of the chunk from whose
        logits the log probability of the next token is computed.

        Leaves out tokens whose logits were used for this before a preemption.
        """
        assert self.kv.score_from is not None, "all is scored"
        start, last = self.kv.score_from, self.prompt_length - 1
        end = max(start, min(chunk.end, last))
        self.kv.score_from = end if end < last else None
        return ScoredRows(self, start, end)

    def release(self) -> None:
        """Release the adapter's lease and the penalty slot of a sequence that stops running.

        If the sequence runs again, all its tokens are computed like a prompt.
        """
        self.decode_tokens = 1
        if self.lease is not None:
            self.lease.release()
            self.lease = None
        self._release_penalty_slot()

    def add_pending(self, row: int, forced: tuple[int, ...] = ()) -> None:
        """Record that a step was launched that samples the sequence's next token.

        row: row of the step's logits that the token is sampled from.
        forced: tokens that follow the sampled one without sampling, because the grammar leaves no
            choice.
        """
        self.pending_rows.append(row)
        self.forced, self.decode_tokens = forced, 1 + len(forced)
        self.length += self.decode_tokens
        if self.complete:  # nothing more is sampled, and another sequence may take the slot
            self._release_penalty_slot()

    def accept_drafted(self, tokens: tuple[int, ...], forced: tuple[int, ...] = ()) -> None:
        """Append the drafted tokens that equal the oldest sampled tokens not read yet.

        A further token, sampled behind these, remains pending. Raises InvalidRequest if the grammar
        does not accept a token.

        forced: tokens that follow the pending token without sampling.
        """
        self.forced = forced
        self.length += len(tokens) + len(forced)
        if self.status is SequenceStatus.RUNNING:  # else release() has set it
            self.decode_tokens = 1 + len(forced)
        self._append(tokens)

    def accept(self, token: int, predicted: tuple[int, ...] = ()) -> FinishReason | None:
        """Append the oldest sampled token that was not read yet, and the tokens forced after it.

        Returns the reason why the sequence ends; None if it goes on. A stop id ends the sequence
        and is not appended. Raises InvalidRequest if the grammar does not accept a token.

        token: the sampled token, which the host has just read.
        predicted: tokens that the MTP head or the draft LoRA predicts after it.
        """
        self.awaits_read = self.awaits_read and len(self.pending_rows) > 1
        if token in self.stop_ids:
            self.pending_rows.clear()
            self.length = len(self.tokens)
            return FinishReason.STOP
        del self.pending_rows[0]
        accepted, self.forced = (token, *self.forced), ()
        self._append(accepted)
        if self.lookup is not None and len(accepted) == 1 and predicted:
            self.lookup.predicted = predicted
        if self.matcher is not None and self.matcher.must_end:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.complete and not self.pending_rows else None

    def _append(self, tokens: tuple[int, ...]) -> None:
        if isinstance(self.tokens, tuple):
            self.tokens = self.kv.tokens = list(self.tokens)
        self.tokens.extend(tokens)
        if self.lookup is not None:
            self.lookup.extend(tokens)
        if self.matcher is not None:
            for token in tokens:
                self.matcher.accept(token)

    def _release_penalty_slot(self) -> None:
        if self.penalty_slot is not None:
            self.penalty_slot.release()
            self.penalty_slot = None


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a sequence, computed in one step.

    completes: whether the sequence's next token is sampled from the chunk.
    pages: the sequence's KV pages when the step was planned, one list for each group of layers. A
        sequence that is preempted later gets other pages.
    state: use that the step makes of the sequence's state of delta nets; None in a model without
        delta nets.
    drafted: predicted tokens at the chunk's end. A token is sampled in the place of each of them,
        and one behind the last.
    holds: whether the sequence takes part in no other step until the host has read this one.
    noise: random tokens behind the chunk, from which the draft LoRA predicts the tokens after the
        next one. They take part in the same step, as another chunk.
    draft: lease of the draft LoRA in that other chunk; None in all others.
    """

    sequence: Sequence
    start: int
    end: int
    completes: bool
    pages: "list[array[int]]"
    state: StateUse | None = None
    drafted: tuple[int, ...] = ()
    holds: bool = False
    noise: tuple[int, ...] = ()
    draft: AdapterLease | None = None

    @classmethod
    def of(cls, sequence: Sequence, max_tokens: int) -> "Chunk":
        """Make a chunk of the sequence's next tokens to compute, at most max_tokens."""
        kv, total = sequence.kv, sequence.length
        end = kv.computed + max_tokens
        if end < total:
            return cls(sequence, kv.computed, end, False, kv.pages)
        return cls(sequence, kv.computed, total, True, kv.pages)

    @property
    def length(self) -> int:
        """Number of tokens in the chunk."""
        return self.end - self.start

    @property
    def rows(self) -> int:
        """Number of tokens that are sampled from the chunk, each from a row of the logits."""
        return 1 + len(self.drafted) if self.completes else 0

    @property
    def pools(self) -> bool:
        """Whether the chunk ends a prompt that is pooled, or has tokens whose mean is taken."""
        pooling = self.sequence.request.pools
        if pooling is None or self.draft is not None:
            return False
        return self.completes or pooling is Pooling.MEAN

    @property
    def lease(self) -> AdapterLease | None:
        """Lease of the adapter that changes the chunk's last token; None if none does."""
        if self.draft is not None:
            return self.draft
        return self.sequence.lease if self.end > self.sequence.active_from else None


class ScoredRows(NamedTuple):
    """Prompt tokens `start` to `end` (excluded) of one chunk, for prompt_logprobs.

    From the logits of each of these tokens, the log probability of the next prompt token is
    computed: that token is scored.
    """

    sequence: Sequence
    start: int
    end: int

    @property
    def next_tokens(self) -> list[int]:
        """Prompt tokens that are scored: those that follow the tokens `start` to `end`."""
        return list(self.sequence.tokens[self.start + 1 : self.end + 1])

    @property
    def alternatives(self) -> int:
        """Number of most likely tokens to report in addition to each scored prompt token."""
        return self.sequence.request.sampling.prompt_logprobs or 0
