"""One choice of a request on its way through the engine, and its share of one step."""

import time
from array import array
from typing import NamedTuple, Protocol

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.fairness import Account
from lorikeet_engine.grammar import Matcher
from lorikeet_engine.kv_cache import PrefixKeys
from lorikeet_engine.request import Course, FinishReason, Request


class Lease(Protocol):
    """The right to use one adapter's slot on the GPU until it is released."""

    @property
    def slot(self) -> int:
        """The adapter's row in the table of LoraWeights."""

    @property
    def rank(self) -> int:
        """The adapter's largest rank."""

    def release(self) -> None:
        """Give it back; a second time does nothing."""


class Sequence:
    """The tokens of one choice, prompt and made, and what it holds while it runs.

    arrival: its number in the order of arrival; arrived_s: when that was, by the monotonic clock.
    max_tokens: the request's, cut to the context.
    stop_ids: tokens that end it. seed: the choice's own. matcher: of its grammar, told of every
    token that is known. plain: it has no grammar, no penalties, and tells no logprobs.
    tokens: those that are known. pending: of each that was drawn behind them and is not known yet,
    the row of the step that drew it. length: how many both are.
    computed: how many tokens' keys and values a step given to the device has put into `pages`.
    written: how many are there for sure, since that step has been read.
    overtaken: how many with adapters were admitted while others' adapters kept it out, until it was
    looked at last; kept_out_at of all that ever were had been by then.
    account, worth: its tenant's, and what it is expected to cost; set when it begins to wait.
    paid: so many tokens of its prompt were charged, or found in the cache before them.
    came_cold, loaded_s: whether its adapter was not on the GPU then, and when it came.
    found: where its adapter was when the request came. told_s: when its last token was told.
    ended: it will never run again.
    """

    account: Account

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
        self.arrived_s = time.monotonic()
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.seed = seed
        self.matcher = matcher
        sampling = request.sampling
        self.plain = matcher is None and sampling.logprobs is None and not sampling.penalises
        self.tokens = list(request.prompts[choice // request.n])
        self.pending: list[int] = []
        self.prompt_length = self.length = len(self.tokens)
        self.computed = 0
        self.written = 0
        self.pages: array[int] = array("i")  # not a list: page tables are joined bytes
        self.lease: Lease | None = None
        self.overtaken = 0
        self.kept_out_at: int | None = None
        self.worth = 0.0
        self.paid = 0
        self.came_cold = False
        self.loaded_s: float | None = None
        self.found: Residency | None = None
        self.told_s: float | None = None
        self.begun_s: float | None = None
        self.first_s: float | None = None
        self.cached_tokens = self.preemptions = self.steps = 0
        self.ended = False
        digest = request.adapter.digest if request.adapter else ""
        self._page_size = page_size
        self._keys = PrefixKeys(page_size, request.salt, digest)

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
        return self.length - self.computed

    def full_keys(self) -> list[bytes]:
        """The keys of the pages that its written tokens fill."""
        return self._keys.first(self.written // self._page_size, self.tokens)

    def coming_keys(self) -> list[bytes]:
        """The keys of the pages that its known tokens will fill once they are written."""
        written, known = self.written // self._page_size, len(self.tokens) // self._page_size
        return self._keys.first(known, self.tokens)[written:] if written < known else []

    def shareable_keys(self) -> list[bytes]:
        """The keys of the full pages that leave it a token to compute logits from."""
        return self._keys.first((len(self.tokens) - 1) // self._page_size, self.tokens)

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

    def course(self) -> Course:
        """What it went through until now, when its newest token has become known."""
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
        start, total = sequence.computed, sequence.length
        end = start + most
        if end < total:
            return cls(sequence, start, end, False, sequence.pages)
        return cls(sequence, start, total, True, sequence.pages)

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self.end - self.start
