"""The table of every feature of users' adapters, by axis."""

from collections.abc import Mapping

from tests.corpus.base_names import BASE_NAME
from tests.corpus.config_keys import CONFIG
from tests.corpus.damage import DAMAGE
from tests.corpus.features import Axis, Feature
from tests.corpus.files import FILES
from tests.corpus.methods import METHODS
from tests.corpus.names import PLACE, WRAPPING
from tests.corpus.numbers import NUMBERS
from tests.corpus.tools import TOOLS
from tests.corpus.training import TRAINING

FEATURES: tuple[Feature, ...] = (
    *TRAINING,
    *METHODS,
    *NUMBERS,
    *TOOLS,
    *DAMAGE,
    *WRAPPING,
    *PLACE,
    *CONFIG,
    *BASE_NAME,
    *FILES,
)
ACCEPTED: Mapping[Axis, tuple[Feature, ...]] = {
    axis: tuple(f for f in FEATURES if f.axis is axis and not f.says) for axis in Axis
}
REFUSED: tuple[Feature, ...] = tuple(feature for feature in FEATURES if feature.says)
PLAIN = TRAINING[0]
"""Training of every case that names no other."""
