"""The families of base models that can be served.

`family` defines how a family is described, and `table` describes all of them; `vision_language`
lists the vision-language models whose text part belongs to one of these families.
"""

from lorikeet_engine.adapter_format.families.family import (
    EMBEDDING_ROWS,
    EMBEDDINGS,
    HEAD,
    HEAD_ROWS,
    LAYER_INPUTS,
    OUTER,
    OUTER_MODULES,
    SCORE,
    ExpertKeys,
    Family,
    LayerKind,
    LayerNorms,
    Linear,
    Parallel,
    QkNormKind,
    RecurrentKeys,
    Width,
)
from lorikeet_engine.adapter_format.families.table import FAMILIES, VARIANTS
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
    "LAYER_INPUTS",
    "OUTER",
    "OUTER_MODULES",
    "SCORE",
    "TEXT_DECODERS",
    "VARIANTS",
    "VISION_LANGUAGE",
    "ExpertKeys",
    "Family",
    "LayerKind",
    "LayerNorms",
    "Linear",
    "Parallel",
    "QkNormKind",
    "RecurrentKeys",
    "Width",
]
