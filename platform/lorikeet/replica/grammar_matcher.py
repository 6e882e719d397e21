"""Matchers of grammars, built on llguidance, which mask tokens in the engine.

No error quotes text that was sampled under a grammar, since errors are logged.
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

    The tokenizer is read at first use.
    """

    def __init__(self, model: Path) -> None:
        self._model = model

    def compile(self, text: str) -> "TextMatcher":
        """Compile a grammar; return a matcher at the beginning of a choice.

        Raises InvalidRequest if llguidance refuses the grammar.
        """
        limits = LLParserLimits(step_lexer_fuel=_STEP_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            reason = _LARK_CONTEXT.sub("", matcher.get_error().split("\n<", 1)[0])
            raise InvalidRequest(reason[:_LONGEST_REASON], param="grammar")
        compiled = TextMatcher(matcher)
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
        # llguidance needs rows of exactly its vocabulary; models pad theirs
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
        return [_too_complex(each.state) if each.state.is_error() else None for each in ours]

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        eos = sorted({*_eos(self._model / "config.json"), *_eos(self._model / _GENERATION)})
        try:
            text = (self._model / "tokenizer.json").read_text("utf-8")
            saved = json.loads(text)
            if saved.get("truncation") or saved.get("padding"):
                # as in PromptEncoder: both would change the tokens of forced texts
                text = json.dumps(saved | {"truncation": None, "padding": None})
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

    def __init__(self, state: LLMatcher, forced: "array[int] | None" = None, at: int = 0) -> None:
        """Wrap a matcher of llguidance.

        state: llguidance's matcher.
        forced: forced tokens; None if not computed yet.
        at: index in `forced` of the choice's next token.
        """
        self.state = state
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
        return TextMatcher(self.state.deep_copy(), self._forced, self._forced_at)


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
