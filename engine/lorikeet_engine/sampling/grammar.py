"""Interface of grammars, which restrict the tokens that may follow an output.

The engine knows no text and no grammar language; the program that creates it may pass a Grammars
that does.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lorikeet_engine.errors import EngineError, InvalidRequest

log = logging.getLogger(__name__)

TokenBitmask = npt.NDArray[np.uint8]
"""Bitmask of tokens: token t is bit t % 8, counted from the lowest, of byte t // 8."""


def octets_of(vocab: int) -> int:
    """Return the bytes of a vocabulary's bitmask: whole words of 32 bits."""
    return 4 * -(-vocab // 32)


class Matcher(Protocol):
    """State of one choice's output in its grammar."""

    @property
    def may_end(self) -> bool:
        """Whether the output so far is complete."""

    @property
    def must_end(self) -> bool:
        """Whether no token can follow."""

    def forced_tokens(self) -> Sequence[int]:
        """Return the next tokens as far as each is the only token that may follow.

        The output cannot end before the last of them. May return fewer than there are, or none.
        Called in every step, so implementations cache results that take long to find.
        """

    def accept(self, token: int) -> None:
        """Append a token to the output.

        Raises InvalidRequest if no output of the grammar begins with these tokens.
        """

    def copy(self) -> "Matcher":
        """Copy the matcher for another choice with the same output so far."""


class Grammars(Protocol):
    """Compiler of grammars, and source of the tokens that may follow."""

    def compile(self, text: str) -> Matcher:
        """Compile a grammar to a matcher of an empty output.

        May be called on any thread. Raises InvalidRequest for a bad grammar.
        """

    def fill_bitmasks(
        self, matchers: Sequence[Matcher], bitmasks: TokenBitmask
    ) -> Sequence[InvalidRequest | None]:
        """Set the bits of the tokens that may follow, and return each matcher's error or None.

        The engine sets the bits of end-of-sequence tokens itself.

        matchers: results of `compile`.
        bitmasks [matchers, octets_of(vocab)]: all 0.
        """


def grammar_error(error: BaseException, request_id: str) -> EngineError:
    """Convert an error of a request's grammar to the request's error. Bugs' errors are logged."""
    if isinstance(error, EngineError):
        return error
    log.error("grammar_failed", exc_info=error, extra={"request": request_id})
    return InvalidRequest("the grammar cannot be followed: its matcher broke", param="grammar")
