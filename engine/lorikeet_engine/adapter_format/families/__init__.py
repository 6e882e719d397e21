"""The families of base models that are served, and what they are described by.

`table` has them all, each a `family` of `linear`s; `vision_language` says within which other models
they are found.
"""

from lorikeet_engine.adapter_format.families.family import (
    EMBEDDING_ROWS,
    EMBEDDINGS,
    HEAD,
    HEAD_ROWS,
    OUTER_MODULES,
    Family,
    LayerNorms,
    Linear,
    Parallel,
    QkNormKind,
    Width,
)
from lorikeet_engine.adapter_format.families.table import FAMILIES
from lorikeet_engine.adapter_format.families.vision_language import (
    TEXT_DECODERS,
    VISION_LANGUAGE,
)

__all__ = [
    "EMBEDDINGS",
    "EMBEDDING_ROWS",
    "FAMILIES",
    "HEAD",
    "HEAD_ROWS",
    "OUTER_MODULES",
    "TEXT_DECODERS",
    "VISION_LANGUAGE",
    "Family",
    "LayerNorms",
    "Linear",
    "Parallel",
    "QkNormKind",
    "Width",
]
