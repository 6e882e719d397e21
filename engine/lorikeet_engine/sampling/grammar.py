"""Interface of grammars, which restrict the tokens that may follow an output.

The engine itself knows neither text nor any grammar language; the program that creates the engine
may pass it a Grammars that does.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lorikeet_engine.errors import EngineError, InvalidRequest

log = logging.getLogger(__name__)

TokenBitmask = npt.NDArray[np.uint8]
"""Bitmask over the vocabulary: token t is bit t % 8, counted from the lowest, of byte t // 8."""


def octets_of(vocab: int) -> int:
    """Return the bytes of a bitmask over the vocabulary, a multiple of 4.

    vocab: number of tokens in the vocabulary.
    """
    return 4 * -(-vocab // 32)


class Matcher(Protocol):
    """Position in a grammar that one choice's output has reached."""

    @property
    def may_end(self) -> bool:
        """Whether the output so far is complete, so that it may end."""

    @property
    def must_end(self) -> bool:
        """Whether no token may follow the output so far."""

    def forced_tokens(self) -> Sequence[int]:
        """Return the next tokens for as long as only one token may follow.

        The output cannot end before the last returned token. May return fewer tokens than are
        forced, or none. Called in every step, so implementations cache results that take long to
        find.
        """

    def accept(self, token: int) -> None:
        """Append a token to the output.

        Raises InvalidRequest if no output of the grammar begins with the output so far and this
        token.
        """

    def copy(self) -> "Matcher":
        """Copy this matcher for another choice that has the same output so far."""


class Grammars(Protocol):
    """Compiler of grammars, which also computes the tokens that may follow outputs."""

    def compile(self, text: str) -> Matcher:
        """Compile a grammar to a matcher whose output is empty.

        May be called on any thread. Raises InvalidRequest for an invalid grammar.

        text: the grammar, in a language that the implementation defines.
        """

    def fill_bitmasks(
        self, matchers: Sequence[Matcher], bitmasks: TokenBitmask
    ) -> Sequence[InvalidRequest | None]:
        """Set the bits of tokens that may follow each output. Returns each matcher's error or None.

        The engine sets the bits of end-of-sequence tokens itself.

        matchers: one for each output, from `compile` or Matcher.copy.
        bitmasks [matchers, octets_of(vocab)]: all 0 at first.
        """


def grammar_error(error: BaseException, request_id: str) -> EngineError:
    """Convert an error of a request's grammar to an EngineError for the request.

    Logs an error that is not an EngineError, because it is a bug of the grammar implementation.
    """
    if isinstance(error, EngineError):
        return error
    log.error("grammar_failed", exc_info=error, extra={"request": request_id})
    return InvalidRequest("the grammar cannot be followed: its matcher broke", param="grammar")
