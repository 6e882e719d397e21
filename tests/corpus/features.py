"""What a feature of an adapter's folder is, and what may be said of it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from tests.corpus.draft import Draft

Build = Callable[[Draft], object]

EQUAL = ""
# What LoRA outside the decoder's linears comes to. Once one is served, EQUAL stands here.
LM_HEAD = EMBEDDINGS = TRAINED_TOKENS = EQUAL


class Axis(IntEnum):
    """What a feature is of. A case has at most one feature of each, built in this order."""

    TRAINING = 0  # what was trained, saved by PEFT
    NUMBERS = 1  # how the values are stored
    TOOL = 2  # another trainer's files and config
    DAMAGE = 3  # tensors that are not as they should be
    WRAPPING = 4  # names with what wrapped the model
    PLACE = 5  # names with where the language model was
    CONFIG = 6  # what else the config says
    BASE_NAME = 7  # what the base model is called
    FILES = 8  # the files around it


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table.

    says: EQUAL, or what register's refusal says, an expression. excludes: axes of which a case with
    this feature has no other. silent: the base model says the same under such an adapter.
    """

    name: str
    axis: Axis
    build: Build
    says: str = EQUAL
    excludes: frozenset[Axis] = frozenset()
    silent: bool = False

    def fits(self, other: "Feature") -> bool:
        """Whether both can be of one adapter."""
        apart = self.axis not in other.excludes and other.axis not in self.excludes
        return self.axis != other.axis and apart
