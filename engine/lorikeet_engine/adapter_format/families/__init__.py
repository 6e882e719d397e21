"""The families of base models that are served.

`table` lists them, in the terms of `family`; `vision_language` lists the larger models whose text
part is one of them.
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
