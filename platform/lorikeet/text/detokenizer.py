"""Detokenization: names of single tokens, and the growing text of a choice."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cached_property, lru_cache

import regex
from tokenizers import Tokenizer, decoders
from tokenizers.decoders import DecodeStream

from lorikeet.text.logprobs import NamedToken, SampledToken
from lorikeet.text.reasoning import ReasoningParser
from lorikeet_engine.request import MAX_LOGPROBS, TokenLogprobs

_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = (byte for byte in range(256) if byte not in _SHOWN)
_BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + index): byte for index, byte in enumerate(_HIDDEN)
}
"""Byte that each character stands for in byte-level vocabularies (GPT-2's)."""
_BYTE = regex.compile("<0x([0-9A-F]{2})>")  # byte tokens of SentencePiece vocabularies
_KEPT_NAMES = 2**15
"""Number of tokens whose names and JSON are cached, at some 400 bytes each."""
_CONTEXT_TOKENS = 8  # enough for decoders that join words with spaces
_MAX_UNDECODED = 64
"""Maximum number of tokens held back because their bytes end in an incomplete character.

Each further token decodes all held-back tokens again.
"""
_REPLACEMENT = "\ufffd"  # stands for bytes that are no character
_PART_TOKENS = 3  # longest incomplete UTF-8 character, at one byte a token


class Vocabulary:
    """Names and bytes of one tokenizer's tokens.

    added: ids of the tokenizer's added tokens by their text, special or not.
    special: ids of special tokens.
    named: cached function from a token id to its NamedToken.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self.special = frozenset(i for i, token in self._added.items() if token.special)
        self.added = {str(token.content): i for i, token in self._added.items()}
        self.named: Callable[[int], NamedToken] = lru_cache(_KEPT_NAMES)(self._named)

    @cached_property
    def by_id(self) -> "Vocabulary":
        """Copy of the vocabulary in which a token's name is its id, "token_id:17", as in vLLM."""
        other = copy(self)
        other.named = lru_cache(_KEPT_NAMES)(
            lambda token: NamedToken(f"token_id:{token}", self.bytes_of(token))
        )
        return other

    def with_added(self, tokenizer: Tokenizer) -> "Vocabulary":
        """Return the vocabulary of a tokenizer that has this one's tokens and more; both share the
        cached names of the tokens that both have.
        """
        other = Vocabulary(tokenizer)
        same = {*self._flags()}
        more = {token for token, *flags in other._flags() if (token, *flags) not in same}
        own, ours = other.named, self.named
        other.named = lambda token: own(token) if token in more else ours(token)
        return other

    def special_except(self, shown: Iterable[str]) -> frozenset[int]:
        """Return the ids of all special tokens except those whose text is in `shown`."""
        return self.special.difference(map(self.tokenizer.token_to_id, shown))

    def bytes_of(self, token: int) -> bytes | None:
        """Return a token's bytes, possibly part of a UTF-8 character; None for special tokens."""
        if token in self._added:
            return None if token in self.special else str(self._added[token].content).encode()
        word = self.tokenizer.id_to_token(token)
        if word is None:  # not in the tokenizer: checkpoints pad their vocabulary
            return None
        if self._byte_level:
            return bytes(_BYTE_OF[character] for character in word)
        if byte := _BYTE.fullmatch(word):
            return bytes([int(byte[1], 16)])
        return str(word).replace("▁", " ").encode()

    def _name_of(self, token: int, octets: bytes | None) -> str:
        r"""Return a token's text. Bytes of an incomplete character are escaped, such as \xf0\x9f.

        octets: the token's bytes; None for a special token.
        """
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
        """Return a token with its log probability and at most `alternatives` alternatives.

        logprobs: None for a prompt's first token.
        offset: index in the text of the token's first character.
        """
        named = self.named
        if logprobs is None:
            return SampledToken((named(token),), (None,), offset)
        top = logprobs.top[:alternatives]
        tokens = [named(token), *[named(i) for i, _ in top]]
        return SampledToken(tokens, [logprobs.logprob, *[likely for _, likely in top]], offset)

    def _flags(self) -> Iterable[tuple[int, str, bool]]:
        return ((i, str(token.content), token.special) for i, token in self._added.items())

    def _named(self, token: int) -> NamedToken:
        octets = self.bytes_of(token)
        return NamedToken(self._name_of(token, octets), octets)


class StopStrings:
    """Stop strings of a call, shared by its choices."""

    def __init__(self, stop: Iterable[str] = ()) -> None:
        self._stop = tuple(stop)
        self._prefixes = {each[:end] for each in self._stop for end in range(1, len(each))}
        self._longest = max(map(len, self._prefixes), default=0)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._stop)

    def find(self, text: str) -> int | None:
        """Return the position of the first stop string in a text; None if there is none."""
        return min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=None)

    def at(self, text: str, begin: int) -> str:
        """Return the stop string that a text contains at `begin`, a position that `find`
        returned.
        """
        return next(stop for stop in self._stop if text.startswith(stop, begin))

    def partial_length(self, text: str) -> int:
        """Return the length of the longest suffix of a text that is a prefix of a stop string."""
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._prefixes), 0)


NO_STOP_STRINGS = StopStrings()


class Detokenizer:
    """Incremental decoder of one choice's tokens, which ends at a stop string.

    Text that may still become a stop string and bytes of an incomplete character are held back.

    tokens: number of tokens received.
    sent_tokens: number of tokens whose text was returned.
    offsets: for each token, the index in the text of its first character.
    stop_string: the stop string that ended the choice; None if no stop string did.

    Constructor arguments:
    prompt: token ids before the choice's tokens, as context for decoding.
    min_tokens: number of leading tokens in which stop strings are ignored.
    hidden: ids of tokens that are left out of the text; None hides all special tokens.
    reasoning: parser that removes thinking from the text's beginning; stop strings are looked
        for only after the thinking.
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
        self._context = list(prompt[-_CONTEXT_TOKENS:])  # tokens before the undecoded ones
        self._repeated = ""  # text that the decoder will return once more
        self._begin()
        self._stop_strings, self._may_stop = stop, bool(stop)
        self._min_tokens = min_tokens
        self._reasoning = reasoning
        self._undecoded: list[int] = []
        self._held = ""
        self._decoded = 0  # characters
        self._sent = 0
        self._ends: list[int] = []  # last character + 1 of each decoded token
        self.offsets: list[int] = []
        self.sent_tokens = 0
        self.tokens = 0
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the choice."""
        return self.stop_string is not None

    def push(self, token_ids: Iterable[int]) -> str:
        """Decode new tokens; return the text that later tokens can no longer change."""
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
        """Return the text that was held back; if it contains a stop string, only the text before
        it.

        No tokens may follow.
        """
        if self.stopped:
            return ""
        certain = self._advance(self._text_of(self._undecoded), last=True)
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
        text = self._take(token_id)
        return text + self._flush_undecodable() if len(self._undecoded) == _MAX_UNDECODED else text

    def _take(self, token_id: int) -> str:
        self._undecoded.append(token_id)
        broken = False
        try:
            text = self._decoder.step(self._tokenizer, token_id)
        except Exception:  # in byte tokens, a wrong byte makes those before it wrong, too
            text, broken = self._text_of(self._undecoded), True
        if text is None:
            return ""
        if self._repeated:
            text, self._repeated = _behind(self._repeated, text), ""
        self._context = self._undecoded[-_CONTEXT_TOKENS:]
        self._undecoded.clear()
        if broken:
            self._begin()
        self._note_decoded(len(text), self.tokens)
        return str(text)

    def _flush_undecodable(self) -> str:
        """Return the text of waiting tokens whose bytes do not become whole characters.

        The last tokens go on waiting, since they may be the first part of a character.
        """
        settled, rest = self._undecoded[:-_PART_TOKENS], self._undecoded[-_PART_TOKENS:]
        before, both = map(self._text_of, (self._context, self._context + settled))
        text = _behind(before, both)
        self._note_decoded(len(text), self.tokens - len(rest))
        self._undecoded = []
        self._begin()
        return text + "".join(map(self._take, rest))

    def _begin(self) -> None:
        """Begin to decode behind the context.

        A decoder whose context ends in an incomplete character repeats the context's text in the
        first text that it returns. One whose context begins within a character may take all byte
        tokens behind it for wrong ones.
        """
        texts = ((at, self._text_of(self._context[at:])) for at in range(len(self._context)))
        whole = (found for found in texts if not found[1].startswith(_REPLACEMENT))
        at, before = next(whole, (0, self._text_of(self._context)))
        del self._context[:at]
        self._decoder = DecodeStream(ids=self._context, skip_special_tokens=self._skip_special)
        self._repeated = before if before.endswith(_REPLACEMENT) else ""

    def _text_of(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special))

    def _note_decoded(self, characters: int, tokens: int) -> None:
        """Record newly decoded characters, and the number of all tokens decoded so far."""
        self._decoded += characters
        self._ends += [self._decoded] * (tokens - len(self._ends))

    def tokens_until(self, character: int) -> int:
        """Return the number of tokens that end at or before a character of the choice's text.

        character: index in the text.
        """
        return bisect_right(self._ends, character)

    def _count_sent(self) -> None:
        sent = self._sent if self._reasoning is None else self._sent + self._reasoning.removed
        while self.sent_tokens < len(self._ends) and self._ends[self.sent_tokens] <= sent:
            self.sent_tokens += 1
        if self.stopped:  # the token in which the stop string begins may hold text before it
            while self.sent_tokens < self.tokens and self.offsets[self.sent_tokens] < sent:
                self.sent_tokens += 1

    def _advance(self, text: str, *, last: bool = False) -> str:
        if self._reasoning is not None:
            text = self._reasoning.push(text, last=last)
        self._held += text
        if not self._may_stop or self.tokens <= self._min_tokens:
            certain, self._held = self._held, ""
            return certain
        begin = self._stop_strings.find(self._held)
        if begin is not None:
            self.stop_string = self._stop_strings.at(self._held, begin)
            return self._held[:begin]
        end = len(self._held) - self._stop_strings.partial_length(self._held)
        certain, self._held = self._held[:end], self._held[end:]
        return certain


def _behind(before: str, text: str) -> str:
    """Return a text without the beginning that it shares with `before`."""
    pairs = enumerate(zip(before, text, strict=False))
    return text[next((at for at, (one, other) in pairs if one != other), len(before)) :]
