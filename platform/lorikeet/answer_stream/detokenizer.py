"""Tokens to text, as they come, for one choice."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT_TOKENS = 8  # enough of the prompt for a decoder that joins words to see what came before


class Detokenizer:
    """Decodes one choice incrementally and ends it at a stop string.

    Text that may still become a stop string, and bytes that are not yet a whole character, are
    held back. Stop strings are not looked for in the first `min_tokens` tokens. Special tokens are
    not text, or only those in `hidden` if it is given. `sent_tokens` counts tokens whose text is
    sent; `offsets` says at which character of the text each token begins.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        hidden: frozenset[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden or frozenset()
        self._skip_special = hidden is None
        context = list(prompt[-_CONTEXT_TOKENS:])
        self._decoder = DecodeStream(ids=context, skip_special_tokens=self._skip_special)
        self._stop = stop
        self._min_tokens = min_tokens
        self._undecoded: list[int] = []
        self._held = ""
        self._decoded = 0  # characters
        self._sent = 0
        self._ends: list[int] = []  # where the text of each token ends, as far as that is known
        self.offsets: list[int] = []
        self.sent_tokens = 0
        self.tokens = 0
        self.stopped = False

    def push(self, token_ids: Iterable[int]) -> str:
        """Take new tokens; return the text that is now certain."""
        sendable = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self.tokens += 1
            self.offsets.append(self._decoded)
            sendable += self._advance(self._decode(token_id))
        self._sent += len(sendable)
        self._count_sent()
        return sendable

    def finish(self) -> str:
        """Return what was held back: no more tokens will come."""
        if self.stopped:
            return ""
        rest = self._tokenizer.decode(self._undecoded, skip_special_tokens=self._skip_special)
        held, self._held = self._held, ""
        self.sent_tokens = self.tokens
        return held + rest

    def _decode(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._undecoded.append(token_id)
        text = self._decoder.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._undecoded.clear()
        self._decoded += len(text)
        self._ends += [self._decoded] * (self.tokens - len(self._ends))
        return str(text)

    def _count_sent(self) -> None:
        while self.sent_tokens < len(self._ends) and self._ends[self.sent_tokens] <= self._sent:
            self.sent_tokens += 1
        if self.stopped:  # of the token in which the stop string begins, a part may be text
            while self.sent_tokens < self.tokens and self.offsets[self.sent_tokens] < self._sent:
                self.sent_tokens += 1

    def _advance(self, text: str) -> str:
        self._held += text
        if self.tokens <= self._min_tokens:
            certain, self._held = self._held, ""
            return certain
        ends = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            return self._held[: min(ends)]
        end = len(self._held) - self._possible_stop()
        certain, self._held = self._held[:end], self._held[end:]
        return certain

    def _possible_stop(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
