"""What a choice may say: the engine's view of a grammar, in whatever language.

The engine knows no text; whoever builds it may hand it Grammars that do.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lorikeet_engine.errors import InvalidRequest

Bits = npt.NDArray[np.uint8]


class Matcher(Protocol):
    """How far one choice has come in its grammar."""

    @property
    def may_end(self) -> bool:
        """Whether what it has said is whole."""

    @property
    def must_end(self) -> bool:
        """Whether nothing can follow."""

    def accept(self, token: int) -> None:
        """The choice says this. Raises InvalidRequest where the grammar cannot be followed on."""

    def copy(self) -> "Matcher":
        """Another choice that has come as far."""


class Grammars(Protocol):
    """Compiles grammars, and says what may follow."""

    def compile(self, text: str) -> Matcher:
        """A choice that has said nothing yet. On any thread. Raises InvalidRequest."""

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> Sequence[InvalidRequest | None]:
        """Set the tokens that may follow, and no others; what went wrong with each matcher.

        matchers: of this object's making. bits [matchers, vocab / 8 rounded up]: token t is bit
        t % 8, from the lowest, of byte t // 8. End-of-sequence tokens are not set: the engine
        knows them.
        """
