"""Grammars on llguidance: JSON schemas as grammars, and the engine's side of them.

A grammar is a text in llguidance's dialect of Lark, or its JSON for a schema. No error quotes what
was sampled under a grammar, since errors are logged.
"""

import json
import re
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from lorikeet_engine.adapter_format import decoder_config
from lorikeet_engine.errors import InvalidRequest
from lorikeet_engine.sampling.grammar import Matcher, TokenBitmask, octets_of

_STEP_FUEL = 50_000  # the worst mask takes 0.2 s of a step instead of 1 s; others need far less
_THREADS = 1  # a mask takes microseconds, and each thread is woken in every step
_IN_STRINGS = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRINGS}{{1,{most}}}" for most in (*range(1, 11), 30)),
    f"{_IN_STRINGS}+",
]
"""Kinds of tokens that a mask takes whole where the grammar allows all such texts.

Others are walked one after another, which takes a hundred times as long. So there is one for each
of the last characters that a `maxLength` leaves: llguidance's own begin at ten.
"""
_MOST_TOLD = 256  # of the tokens that must follow; a step takes fewer
_OF_LARK = re.compile(
    r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\n *\d+ \| .*", re.DOTALL
)
"""What an error says of the grammar around a schema, which the client did not write."""
_LONGEST_REASON = 300  # characters; some quote a whole expression


class ModelGrammars:
    """The engine's Grammars over one base model's tokenizer, which is read when first needed."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def compile(self, text: str) -> "TextMatcher":
        """Return the matcher of a choice without tokens. Raises InvalidRequest."""
        limits = LLParserLimits(step_lexer_fuel=_STEP_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            reason = _OF_LARK.sub("", matcher.get_error().split("\n<", 1)[0])
            raise InvalidRequest(reason[:_LONGEST_REASON], param="grammar")
        compiled = TextMatcher(matcher)
        compiled.forced_tokens()  # here, and not in a step for each copy
        return compiled

    def fill_bitmasks(
        self, matchers: Sequence[Matcher], bitmasks: TokenBitmask
    ) -> list[InvalidRequest | None]:
        """Set the bits of tokens that may follow, as the engine's `Grammars` asks.

        llguidance is asked for no mask of a token that must follow. With hundreds of kilobytes that
        must follow, each would take it tens of milliseconds.
        """
        ours = [matcher for matcher in matchers if isinstance(matcher, TextMatcher)]
        assert len(ours) == len(matchers), "matchers that others compiled"
        # llguidance wants rows of just its length; vocabularies of models are rounded up
        own = octets_of(self._tokenizer.vocab_size)
        octets = bitmasks
        if own != bitmasks.shape[1]:
            octets = np.zeros((len(ours), own), np.uint8)
        forced = [matcher.forced_tokens() for matcher in ours]
        if free := [(ours[row].state, row) for row, tokens in enumerate(forced) if not tokens]:
            fill_next_token_bitmask_par(self._executor, free, octets.view(np.int32))
        for row, tokens in enumerate(forced):
            if tokens:
                octets[row, tokens[0] // 8] = 1 << tokens[0] % 8
        for token in self._tokenizer.eos_tokens:
            octets[:, token // 8] &= 255 ^ (1 << token % 8)
        if octets is not bitmasks:
            width = min(own, bitmasks.shape[1])
            bitmasks[:, :width] = octets[:, :width]
        return [_broken(each.state) if each.state.is_error() else None for each in ours]

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        eos = sorted({*_eos(self._model / "config.json"), *_eos(self._model / _GENERATION)})
        try:
            file = str(self._model / "tokenizer.json")
            return LLTokenizer(file, eos_token=eos or None, slices=_SLICES)
        except ValueError as error:
            raise InvalidRequest(f"no grammar fits this model's tokenizer: {error}") from error

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(_THREADS)


class TextMatcher:
    """One choice under a grammar: lorikeet_engine.sampling.grammar.Matcher.

    What must follow is asked of llguidance once, and kept until it has been accepted.
    """

    def __init__(self, state: LLMatcher, told: "array[int] | None" = None, at: int = 0) -> None:
        """Take a matcher. told: the tokens that must follow, from `at` on; None: not asked for."""
        self.state = state
        self._told, self._at = told, at

    @property
    def may_end(self) -> bool:
        """Whether the choice may end here."""
        return self.state.is_accepting()

    @property
    def must_end(self) -> bool:
        """Whether no token can follow."""
        return self.state.is_stopped()

    def forced_tokens(self) -> list[int]:
        """Return tokens that must follow, one after another, as far as that is certain.

        Their bytes have no other spelling in which they would be allowed: where the grammar forces
        bytes, masks have the tokenizer's own next token alone. Not among them are the last ones,
        which might be spelled together with what comes behind. Of a long text come the first.
        """
        if self._told is None:
            self._told, self._at = array("I", self.state.compute_ff_tokens()), 0
        return self._told[self._at : self._at + _MOST_TOLD].tolist()

    def accept(self, token: int) -> None:
        """Append a token to the choice. Raises InvalidRequest."""
        if not self.state.consume_token(token):
            raise _broken(self.state)
        if self._told is not None:
            as_told = self._at < len(self._told) and self._told[self._at] == token
            self._at += 1
            if not as_told or self._at == len(self._told):
                self._told = None

    def copy(self) -> "TextMatcher":
        """Return the matcher of another choice with the same tokens."""
        return TextMatcher(self.state.deep_copy(), self._told, self._at)


_GENERATION = "generation_config.json"


def _eos(config: Path) -> list[int]:
    if not config.exists():
        return []
    found = decoder_config(json.loads(config.read_text())).get("eos_token_id")
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)


def _broken(matcher: LLMatcher) -> InvalidRequest:
    # The matcher's own error would quote what was sampled.
    return InvalidRequest(f"the grammar is too complex to follow on: {matcher.stop_reason()}")
