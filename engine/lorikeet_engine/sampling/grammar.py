"""The engine's interface to grammars, which restrict the tokens that may follow.

The engine knows no text and no grammar language; the program that builds it may pass it a Grammars
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
"""A bit for each token: token t is bit t % 8, from the lowest, of byte t // 8."""


def octets_of(vocab: int) -> int:
    """How many bytes a bitmask of this vocabulary has: whole words of 32 bits."""
    return 4 * -(-vocab // 32)


class Matcher(Protocol):
    """The state of one choice's output in its grammar."""

    @property
    def may_end(self) -> bool:
        """Whether the output is complete as it is."""

    @property
    def must_end(self) -> bool:
        """Whether no token can follow."""

    def forced_tokens(self) -> Sequence[int]:
        """Tokens of which each is the only one that may follow those before it.

        The output cannot end before the last of them. None or fewer, where it is not certain. Asked
        in every step, so what takes long to find has to be kept.
        """

    def accept(self, token: int) -> None:
        """Append a token to the output. Raises InvalidRequest if no output can begin like that."""

    def copy(self) -> "Matcher":
        """A matcher for another choice with the same output so far."""


class Grammars(Protocol):
    """Compiles grammars, and finds the tokens that may follow."""

    def compile(self, text: str) -> Matcher:
        """A matcher of an empty output. On any thread. Raises InvalidRequest for a bad grammar."""

    def fill_bitmasks(
        self, matchers: Sequence[Matcher], bitmasks: TokenBitmask
    ) -> Sequence[InvalidRequest | None]:
        """Set the bits of the tokens that may follow, and return what went wrong with each matcher.

        matchers: made by `compile`. bitmasks [matchers, octets_of(vocab)], all 0. The bits of
        end-of-sequence tokens are left to the engine, which knows them.
        """


def grammar_error(error: BaseException, request_id: str) -> EngineError:
    """Return why a request fails whose grammar raised `error`; what only a bug raises is logged."""
    if isinstance(error, EngineError):
        return error
    log.error("grammar_failed", exc_info=error, extra={"request": request_id})
    return InvalidRequest("the grammar cannot be followed: its matcher broke", param="grammar")
