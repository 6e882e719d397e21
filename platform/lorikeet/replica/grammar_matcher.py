"""Matchers of grammars, built on llguidance, which mask tokens in the engine.

No error quotes text that was sampled under a grammar, since errors are logged.
"""

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from tokenizers import Tokenizer

from lorikeet.request_defaults import MAX_ADDED_TOKENS
from lorikeet_engine.adapter_format import decoder_config
from lorikeet_engine.errors import InvalidRequest
from lorikeet_engine.sampling.grammar import Matcher, TokenBitmask, octets_of

MORE_TOKENS = "\3"
"""Prefix of a grammar that may name tokens of an adapter's own by their ids."""
_STEP_FUEL = 50_000  # limits the worst mask to 0.2 s of a step instead of 1 s; others need far less
_THREADS = 1  # a mask takes microseconds, and every step wakes each thread
_IN_STRINGS = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRINGS}{{1,{most}}}" for most in (*range(1, 11), 30)),
    f"{_IN_STRINGS}+",
]
"""Regular expressions, each of which defines the set of the tokens that it matches. If a grammar
allows every text that an expression matches, llguidance adds the whole set to a mask at once.

Tokens outside such sets are matched one by one, which takes a hundred times as long. The sets for
lengths 1 to 10 serve the last characters before a `maxLength`.
"""
_MAX_FORCED = 256  # forced tokens returned at once; a step takes fewer
_LARK_CONTEXT = re.compile(
    r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\n *\d+ \| .*", re.DOTALL
)
"""Parts of an error message that are about the Lark grammar around a client's schema."""
_LONGEST_REASON = 300  # characters; some messages quote a whole expression


class ModelGrammars:
    """Compiler of grammars for one base model, with the engine's interface `Grammars`.

    Grammars name an adapter's added tokens by their ids, and never match them as text. So one
    tokenizer with MAX_ADDED_TOKENS nameless tokens serves the adapters that add tokens, and another
    without them all others. Each is read at first use.
    """

    def __init__(self, model: Path) -> None:
        self._model = model

    def compile(self, text: str) -> "TextMatcher":
        """Compile a grammar; return a matcher at the beginning of a choice.

        text: the grammar, behind MORE_TOKENS if it may name an adapter's added tokens.

        Raises InvalidRequest if llguidance refuses the grammar.
        """
        limits = LLParserLimits(step_lexer_fuel=_STEP_FUEL, verbose_errors=False)
        tokenizer = self.tokenizer(text)
        text = text.removeprefix(MORE_TOKENS)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            reason = _LARK_CONTEXT.sub("", matcher.get_error().split("\n<", 1)[0])
            raise InvalidRequest(reason[:_LONGEST_REASON], param="grammar")
        compiled = TextMatcher(matcher, tokenizer)
        compiled.forced_tokens()  # once here instead of in a step for each copy
        return compiled

    def fill_bitmasks(
        self, matchers: Sequence[Matcher], bitmasks: TokenBitmask
    ) -> list[InvalidRequest | None]:
        """Set the bits of the tokens that may come next, and clear those of ends of sequence.

        A forced token is the only token that its grammar allows; this method writes its mask
        without asking llguidance.

        matchers: matchers that this class compiled, one for each choice.
        bitmasks: a row for each matcher; token t has bit t % 8 of octet t // 8.

        Returns for each matcher the error that its choice must end with, or None.
        """
        ours = [matcher for matcher in matchers if isinstance(matcher, TextMatcher)]
        assert len(ours) == len(matchers), "matchers that others compiled"
        forced = [matcher.forced_tokens() for matcher in ours]
        tokenizers = {matcher.tokenizer for matcher in ours}
        for each in tokenizers:
            whose = [row for row, matcher in enumerate(ours) if matcher.tokenizer is each]
            free = [(ours[row].state, row) for row in whose if not forced[row]]
            self._fill(free, bitmasks, octets_of(each.vocab_size))
        for row, tokens in enumerate(forced):
            if tokens:
                bitmasks[row, tokens[0] // 8] = 1 << tokens[0] % 8
        for token in {token for each in tokenizers for token in each.eos_tokens}:
            bitmasks[:, token // 8] &= 255 ^ (1 << token % 8)
        return [_too_complex(each.state) if each.state.is_error() else None for each in ours]

    def tokenizer(self, text: str) -> LLTokenizer:
        """Return the tokenizer of a grammar; the first of each kind takes seconds."""
        return self._with_more_tokens if text.startswith(MORE_TOKENS) else self._of_base

    def _fill(self, free: list[tuple[LLMatcher, int]], bitmasks: TokenBitmask, octets: int) -> None:
        """Fill rows of bitmasks by llguidance, which needs rows of exactly its vocabulary; models
        pad theirs.

        free: matchers of one tokenizer, and the row of each.
        octets: bytes of the tokenizer's vocabulary.
        """
        if free and octets == bitmasks.shape[1]:
            fill_next_token_bitmask_par(self._executor, free, bitmasks.view(np.int32))
        elif free:
            filled = np.zeros((len(free), octets), np.uint8)
            placed = [(matcher, at) for at, (matcher, _) in enumerate(free)]
            fill_next_token_bitmask_par(self._executor, placed, filled.view(np.int32))
            width = min(octets, bitmasks.shape[1])
            bitmasks[[row for _, row in free], :width] = filled[:, :width]

    @cached_property
    def _of_base(self) -> LLTokenizer:
        return self._read(0)

    @cached_property
    def _with_more_tokens(self) -> LLTokenizer:
        return self._read(MAX_ADDED_TOKENS)

    def _read(self, more: int) -> LLTokenizer:
        """Read the tokenizer.

        more: number of added tokens to add to it.
        """
        eos = sorted({*_eos(self._model / "config.json"), *_eos(self._model / _GENERATION)})
        try:
            text = (self._model / "tokenizer.json").read_text("utf-8")
            saved = json.loads(text)
            if more or saved.get("truncation") or saved.get("padding"):
                # as in PromptEncoder: truncation and padding would change tokens of forced texts
                added = _with_nameless(saved, more)
                changed = {"truncation": None, "padding": None, "added_tokens": added}
                text = json.dumps(saved | changed)
            return LLTokenizer(text, eos_token=eos or None, slices=_SLICES)
        except ValueError as error:
            raise InvalidRequest(f"no grammar fits this model's tokenizer: {error}") from error

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(_THREADS)


class TextMatcher:
    """Matcher of one choice: implements lorikeet_engine.sampling.grammar.Matcher.

    Forced tokens (each the only one that the grammar allows) are computed once and kept until all
    are accepted.
    """

    def __init__(
        self,
        state: LLMatcher,
        tokenizer: LLTokenizer,
        forced: "array[int] | None" = None,
        at: int = 0,
    ) -> None:
        """Wrap a matcher of llguidance.

        state: llguidance's matcher.
        tokenizer: tokenizer with which the grammar was compiled.
        forced: forced tokens; None if not computed yet.
        at: index in `forced` of the choice's next token.
        """
        self.state, self.tokenizer = state, tokenizer
        self._forced, self._forced_at = forced, at

    @property
    def may_end(self) -> bool:
        """Whether the choice may end at this point."""
        return self.state.is_accepting()

    @property
    def must_end(self) -> bool:
        """Whether the choice must end at this point."""
        return self.state.is_stopped()

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, in order, as far as they are certain.

        Where the grammar forces bytes, a mask allows only the tokenizer's own next token, so no
        other tokens can spell these bytes. The last tokens of a forced text are left out: they
        might merge with the text that follows. Of a long text only the first tokens are returned.
        """
        if self._forced is None:
            self._forced, self._forced_at = array("I", self.state.compute_ff_tokens()), 0
        return self._forced[self._forced_at : self._forced_at + _MAX_FORCED].tolist()

    def accept(self, token: int) -> None:
        """Append a token to the choice. Raises InvalidRequest if llguidance can follow the grammar
        no further.
        """
        if not self.state.consume_token(token):
            raise _too_complex(self.state)
        if self._forced is not None:
            as_forced = (
                self._forced_at < len(self._forced) and self._forced[self._forced_at] == token
            )
            self._forced_at += 1
            if not as_forced or self._forced_at == len(self._forced):
                self._forced = None

    def copy(self) -> "TextMatcher":
        """Return an independent matcher that has accepted the same tokens."""
        return TextMatcher(self.state.deep_copy(), self.tokenizer, self._forced, self._forced_at)


def _with_nameless(saved: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """Return the added tokens of a tokenizer.json, and `count` more of the ids that follow."""
    added = list(saved.get("added_tokens") or ())
    if not count:
        return added
    first = Tokenizer.from_str(json.dumps(saved)).get_vocab_size()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = ((at, f"<|lorikeet_added_{at}|>") for at in range(first, first + count))
    return [*added, *({"id": at, "content": name, "special": True} | flags for at, name in names)]


_GENERATION = "generation_config.json"


def _eos(config: Path) -> list[int]:
    if not config.exists():
        return []
    found = decoder_config(json.loads(config.read_text())).get("eos_token_id")
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)


def _too_complex(matcher: LLMatcher) -> InvalidRequest:
    # Not the matcher's own error, which quotes sampled text.
    return InvalidRequest(f"the grammar is too complex to follow on: {matcher.stop_reason()}")
