"""Vision-language models whose text part is served."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TextDecoder:
    """Text part of some vision-language models, which computes like a family of decoders.

    family: name of that family.
    defaults: values to assume for keys that config.json leaves out, if different from the family's.
    unread: keys of config.json to ignore.
    """

    family: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()


def _sizes(
    hidden: int,
    intermediate: int | None,
    layers: int,
    heads: int,
    kv_heads: int | None,
    vocabulary: int,
    positions: int,
) -> dict[str, int | None]:
    """Return the default sizes of a config class of transformers, by key of config.json.

    Config files may leave out values that equal these defaults.

    kv_heads: None if the class has as many heads of keys as of queries.
    positions: default of max_position_embeddings.
    """
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": positions,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


_LLAMA = _sizes(4096, 11008, 32, 32, None, 32_000, 2048)
_QWEN = _sizes(4096, 22016, 32, 32, 32, 151_936, 32_768)
_QWEN_VL = {
    **_sizes(8192, 29568, 80, 64, 8, 152_064, 32_768),
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
_QWEN3_VL = {"head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 500_000.0}
# By the model_type in text_config.
TEXT_DECODERS: Mapping[str, TextDecoder] = {
    "gemma3_text": TextDecoder(
        "gemma3_text",
        _sizes(2304, 9216, 26, 8, 4, 262_208, 131_072),
        frozenset({"final_logit_softcapping"}),
    ),
    "gemma4_text": TextDecoder("gemma4_text", _sizes(2304, 9216, 30, 8, 4, 262_144, 131_072)),
    "gemma4_unified_text": TextDecoder(
        "gemma4_unified_text", _sizes(2304, 9216, 30, 8, 4, 262_144, 262_144)
    ),
    "granite": TextDecoder("granite", _LLAMA, frozenset({"logits_scaling"})),
    "llama": TextDecoder("llama", _LLAMA),
    "mistral": TextDecoder("mistral", _sizes(4096, 14336, 32, 32, 8, 32_000, 131_072)),
    "ministral3": TextDecoder("ministral3", _sizes(4096, 14336, 34, 32, 8, 131_072, 262_144)),
    "qwen2": TextDecoder("qwen2", _QWEN),
    "qwen2_5_vl_text": TextDecoder("qwen2", _QWEN_VL),
    "qwen2_vl_text": TextDecoder("qwen2", _QWEN_VL),
    "qwen3": TextDecoder("qwen3", {**_QWEN, "head_dim": 128}),
    "qwen3_5_text": TextDecoder("qwen3_5_text", _sizes(4096, 12288, 32, 16, 4, 248_320, 32_768)),
    "qwen3_5_moe_text": TextDecoder(
        "qwen3_5_moe_text",
        _sizes(2048, None, 40, 16, 2, 248_320, 32_768),
    ),
    "qwen3_vl_text": TextDecoder("qwen3", {**_QWEN, **_QWEN3_VL}),
}
# Values of model_type of vision-language models whose text part is served.
VISION_LANGUAGE = (
    *("gemma3", "gemma4", "gemma4_unified", "internvl", "llava", "llava_next", "mistral3"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"),
)
