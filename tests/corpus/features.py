"""Features of adapters' folders, and the outcomes of registering them."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from tests.corpus.draft import Draft

Build = Callable[[Draft], object]

EQUAL = ""


class Axis(IntEnum):
    """Kind of a feature. A case has at most one feature of each kind, built in this order."""

    TRAINING = 0  # an adapter that was trained and saved by PEFT
    NUMBERS = 1  # dtype and range of the values
    TOOL = 2  # another trainer's files and config
    DAMAGE = 3  # wrong tensors
    WRAPPING = 4  # prefixes that wrappers of the model add to names
    PLACE = 5  # prefixes for the language model's place in the whole model
    CONFIG = 6  # other keys of the config
    BASE_NAME = 7  # the base model's name
    FILES = 8  # files around the adapter's


@dataclass(frozen=True, slots=True)
class Feature:
    """Row of the table.

    build: applies the feature to a draft.
    says: EQUAL, or a regular expression that register's refusal matches.
    excludes: axes whose features cannot be in one case with this feature.
    silent: whether the adapter leaves the base model's answers as they are.
    """

    name: str
    axis: Axis
    build: Build
    says: str = EQUAL
    excludes: frozenset[Axis] = frozenset()
    silent: bool = False

    def fits(self, other: "Feature") -> bool:
        """Whether one adapter can have both features."""
        apart = self.axis not in other.excludes and other.axis not in self.excludes
        return self.axis != other.axis and apart
