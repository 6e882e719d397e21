"""Tokens to text: single ones, and those of one choice as they come."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import regex
from tokenizers import Tokenizer, decoders
from tokenizers.decoders import DecodeStream

from lorikeet.answer_stream.logprobs import LikelyToken, SampledToken
from lorikeet.answer_stream.reasoning import ReasoningParser
from lorikeet_engine.request import MAX_LOGPROBS, TokenLogprobs

_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = (byte for byte in range(256) if byte not in _SHOWN)
_BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + index): byte for index, byte in enumerate(_HIDDEN)
}
"""The byte for which each character stands in byte-level vocabularies (GPT-2's)."""
_BYTE = regex.compile("<0x([0-9A-F]{2})>")  # in SentencePiece's vocabularies
_CONTEXT_TOKENS = 8  # enough of the prompt for a decoder that joins words to see what came before


class Vocabulary:
    """The tokens of one tokenizer. added: its own tokens for whole words, special or text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self.special = frozenset(i for i, token in self._added.items() if token.special)
        self.added = {str(token.content): i for i, token in self._added.items()}

    def special_except(self, shown: Iterable[str]) -> frozenset[int]:
        """Return the special tokens except these."""
        return self.special.difference(map(self.tokenizer.token_to_id, shown))

    def bytes_of(self, token: int) -> bytes | None:
        """Return a token's UTF-8 bytes, which may end within a character; None if it is no text."""
        if token in self._added:
            return None if token in self.special else str(self._added[token].content).encode()
        word = self.tokenizer.id_to_token(token)
        if word is None:  # beyond the tokenizer: checkpoints round their vocabulary up
            return None
        if self._byte_level:
            return bytes(_BYTE_OF[character] for character in word)
        if byte := _BYTE.fullmatch(word):
            return bytes([int(byte[1], 16)])
        return str(word).replace("▁", " ").encode()

    def name_of(self, token: int) -> str:
        r"""Return a token's text; for a part of a character its bytes, as \xf0\x9f."""
        octets = self.bytes_of(token)
        if octets is None:
            return str(self.tokenizer.id_to_token(token) or "")
        try:
            return octets.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in octets)

    def describe(
        self,
        token: int,
        logprobs: TokenLogprobs | None,
        offset: int,
        alternatives: int = MAX_LOGPROBS,
    ) -> SampledToken:
        """Return a token with N alternatives; logprobs: None for a prompt's first."""
        if logprobs is None:
            return SampledToken(self._likely(token, None), (), offset)
        top = tuple(self._likely(*likely) for likely in logprobs.top[:alternatives])
        return SampledToken(self._likely(token, logprobs.logprob), top, offset)

    def _likely(self, token: int, logprob: float | None) -> LikelyToken:
        return LikelyToken(self.name_of(token), self.bytes_of(token), logprob)


class StopStrings:
    """The strings that end a choice, made once for all choices of a call.

    How long a look takes does not grow with their number, for all that may be part of one.
    """

    def __init__(self, stop: Iterable[str] = ()) -> None:
        self._stop = tuple(stop)
        self._begun = {each[:end] for each in self._stop for end in range(1, len(each))}
        self._longest = max(map(len, self._begun), default=0)

    def find(self, text: str) -> int | None:
        """Return where the first stop string in a text begins; None if there is none."""
        return min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=None)

    def at(self, text: str, begin: int) -> str:
        """Return the stop string that `find` found there."""
        return next(stop for stop in self._stop if text.startswith(stop, begin))

    def begun(self, text: str) -> int:
        """Return the length of the longest end of a text that begins a stop string."""
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._begun), 0)


NO_STOP_STRINGS = StopStrings()


class Detokenizer:
    """Decodes one choice incrementally and ends it at a stop string.

    Text that may still become a stop string, and bytes that are not yet a whole character, are
    held back. Stop strings are not looked for in the first `min_tokens` tokens. Special tokens are
    not text, or only those in `hidden` if it is given. `sent_tokens` counts tokens whose text is
    sent; `offsets` says at which character of the text each token begins; `stop_string` is the one
    that ended the choice. reasoning: takes what is no part of the answer off the text's beginning;
    stop strings are looked for behind that.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: StopStrings = NO_STOP_STRINGS,
        min_tokens: int = 0,
        hidden: frozenset[int] | None = None,
        reasoning: ReasoningParser | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden or frozenset()
        self._skip_special = hidden is None
        context = list(prompt[-_CONTEXT_TOKENS:])
        self._decoder = DecodeStream(ids=context, skip_special_tokens=self._skip_special)
        self._stop_strings = stop
        self._min_tokens = min_tokens
        self._reasoning = reasoning
        self._undecoded: list[int] = []
        self._held = ""
        self._decoded = 0  # characters
        self._sent = 0
        self._ends: list[int] = []  # where the text of each token ends, as far as that is known
        self.offsets: list[int] = []
        self.sent_tokens = 0
        self.tokens = 0
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the choice."""
        return self.stop_string is not None

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
        """Return what was held back: no more tokens will come. A stop string may be in that too."""
        if self.stopped:
            return ""
        rest = self._tokenizer.decode(self._undecoded, skip_special_tokens=self._skip_special)
        certain = self._advance(rest, last=True)
        if self.stopped:
            self._sent += len(certain)
            self._count_sent()
            return certain
        held, self._held = self._held, ""
        self.sent_tokens = self.tokens
        return certain + held

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

    def tokens_until(self, character: int) -> int:
        """Return how many tokens end at or before a character of the text."""
        return bisect_right(self._ends, character)

    def _count_sent(self) -> None:
        sent = self._sent if self._reasoning is None else self._sent + self._reasoning.removed
        while self.sent_tokens < len(self._ends) and self._ends[self.sent_tokens] <= sent:
            self.sent_tokens += 1
        if self.stopped:  # of the token in which the stop string begins, a part may be text
            while self.sent_tokens < self.tokens and self.offsets[self.sent_tokens] < sent:
                self.sent_tokens += 1

    def _advance(self, text: str, *, last: bool = False) -> str:
        if self._reasoning is not None:
            text = self._reasoning.push(text, last=last)
        self._held += text
        if self.tokens <= self._min_tokens:
            certain, self._held = self._held, ""
            return certain
        begin = self._stop_strings.find(self._held)
        if begin is not None:
            self.stop_string = self._stop_strings.at(self._held, begin)
            return self._held[:begin]
        end = len(self._held) - self._stop_strings.begun(self._held)
        certain, self._held = self._held[:end], self._held[end:]
        return certain
