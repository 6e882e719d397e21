"""The vision-language models whose text part is served."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TextDecoder:
    """A decoder within vision-language models, that computes text as its family's does.

    defaults: what keys mean where the file leaves them out, if not what they mean in the family.
    """

    family: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN_VL = {"rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1_000_000.0}
# By the model_type in text_config, where that is none of a family.
TEXT_DECODERS: Mapping[str, TextDecoder] = {
    "qwen2_vl_text": TextDecoder("qwen2", _QWEN_VL),
    "qwen2_5_vl_text": TextDecoder("qwen2", _QWEN_VL),
    "qwen3_vl_text": TextDecoder("qwen3", {"rope_theta": 500_000.0}),
}
# The model_types of vision-language models that are served as their text part.
VISION_LANGUAGE = (
    *("gemma3", "internvl", "llava", "llava_next", "mistral3"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_vl"),
)
