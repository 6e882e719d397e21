"""One choice of a request on its way through the engine, and its share of one step."""

from array import array
from dataclasses import dataclass
from typing import Protocol

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.kv_cache import PrefixKeys
from lorikeet_engine.request import FinishReason, Request


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

    arrival: its number in the order of arrival. max_tokens: the request's, cut to the context.
    stop_ids: tokens that end it. seed: the choice's own. computed: how many of its tokens have
    their keys and values in `pages`.
    overtaken: how often an adapter's request was admitted ahead of it while it could not be.
    """

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
    ) -> None:
        self.request = request
        self.choice = choice
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.seed = seed
        self.tokens = list(request.prompts[choice // request.n])
        self.prompt_length = len(self.tokens)
        self.computed = 0
        self.pages: array[int] = array("i")  # not a list: numpy copies it into page tables at once
        self.lease: Lease | None = None
        self.overtaken = 0
        digest = request.adapter.digest if request.adapter else ""
        self._page_size = page_size
        self._keys = PrefixKeys(page_size, request.salt, digest)

    @property
    def adapter(self) -> AdapterRef | None:
        """The adapter it runs under, None for the base model alone."""
        return self.request.adapter

    @property
    def made(self) -> int:
        """How many tokens it has made."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens still to be computed before the next can be drawn: 1 means that it decodes."""
        return len(self.tokens) - self.computed

    def full_keys(self) -> list[bytes]:
        """The keys of the pages that its computed tokens fill."""
        return self._keys.first(self.computed // self._page_size, self.tokens)

    def shareable_keys(self) -> list[bytes]:
        """The keys of the full pages that leave it a token to compute logits from."""
        return self._keys.first((len(self.tokens) - 1) // self._page_size, self.tokens)

    def accept(self, token: int) -> FinishReason | None:
        """Take the token drawn for it; a stop id ends it and is not kept."""
        if token in self.stop_ids:
            return FinishReason.STOP
        self.tokens.append(token)
        return FinishReason.LENGTH if self.made == self.max_tokens else None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `length` uncomputed tokens of a sequence: its share of one step."""

    sequence: Sequence
    length: int

    @property
    def completes(self) -> bool:
        """Whether the sequence's next token can be drawn after this chunk."""
        return self.length == self.sequence.remaining
