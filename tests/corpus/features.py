"""A feature of an adapter's folder, and its expected outcome."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from tests.corpus.draft import Draft, Tensors

Build = Callable[[Draft], object]

EQUAL = ""


class Axis(IntEnum):
    """Subject of a feature. A case has at most one feature of each axis, built in this order."""

    TRAINING = 0  # trained modules and options, saved by PEFT
    NUMBERS = 1  # storage of the values
    TOOL = 2  # files and config of another trainer
    DAMAGE = 3  # faulty tensors
    WRAPPING = 4  # prefixes of names by wrappers of the model
    PLACE = 5  # path of the language model in names
    CONFIG = 6  # other keys of the config
    BASE_NAME = 7  # name of the base model
    FILES = 8  # files around the adapter


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table.

    says: EQUAL, or a regular expression for register's refusal.
    excludes: axes that a case with this feature must leave empty.
    silent: the adapter may leave the base model's answers unchanged.
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


def tool(name: str, build: Build, says: str = EQUAL) -> Feature:
    """Return a feature of another trainer's files."""
    return Feature(name, Axis.TOOL, build, says)


def moved(change: Callable[[Tensors], Tensors]) -> Build:
    """Replace an adapter's tensors."""
    return lambda draft: draft.edit_weights(change)


def renamed(old: str, new: str) -> Build:
    """Rename an adapter's tensors."""
    return lambda draft: draft.rename(lambda name: name.replace(old, new))


def then(*builds: Build) -> Build:
    """Build in order."""

    def build(draft: Draft) -> None:
        for each in builds:
            each(draft)

    return build
