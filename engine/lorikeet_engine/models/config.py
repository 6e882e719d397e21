"""What a base model's config.json says, checked and reduced to what the engine needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorikeet_engine.adapter_format import (
    BaseShape,
    QuantizedLinears,
    quantized_linears,
    read_json,
)
from lorikeet_engine.adapter_format.base_config import integer, number, refusal


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's stretched rotary frequencies: long waves are slowed, short ones kept.

    original_context: tokens of context before stretching. Waves longer than
    original_context / low_freq_factor are slowed by `factor`, those shorter than
    original_context / high_freq_factor are kept, those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding over the whole head: frequencies theta ** (-2i / head_dim)."""

    theta: float
    scaling: Llama3RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model of the Llama family: its sizes and in what the families differ.

    max_context: tokens. quantized_linears: how they are stored if they are.
    eos_token_ids: every end-of-sequence id of config.json and generation_config.json, in rising
    order.
    """

    shape: BaseShape
    vocab_size: int
    max_context: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    quantized_linears: QuantizedLinears | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path, max_context: int | None = None) -> "ModelConfig":
        """Read config.json and, if present, generation_config.json.

        max_context: serve fewer tokens than the model's position embeddings allow; this also
        makes room for a model whose sliding window is at least that long. Raises ModelError,
        whose `field` names the key at fault.
        """
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        more = read_json(generation) if generation.exists() else {}
        eos = {*_token_ids(raw), *_token_ids(more)}
        return cls._parse(raw, tuple(sorted(eos)), max_context)

    @classmethod
    def _parse(
        cls, raw: Mapping[str, Any], eos: tuple[int, ...], max_context: int | None
    ) -> "ModelConfig":
        shape, context = BaseShape.from_config(raw), _context(raw, max_context)
        family = shape.family
        _refuse_unsupported(raw, family, context)
        bias = family in ("llama", "qwen3") and bool(raw.get("attention_bias"))
        return cls(
            shape=shape,
            vocab_size=integer(raw, "vocab_size"),
            max_context=context,
            norm_eps=number(raw, "rms_norm_eps", 1e-6),
            rope=_rope(raw),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias")),
            qk_norm=family == "qwen3",
            tied_embeddings=bool(raw.get("tie_word_embeddings")),
            quantized_linears=quantized_linears(raw),
            eos_token_ids=eos,
        )


def _refuse_unsupported(raw: Mapping[str, Any], family: str, context: int) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise refusal("hidden_act", raw["hidden_act"], "silu")
    window = _window(raw, family)
    if window is not None and window < context:
        raise refusal(
            "sliding_window",
            window,
            f"null or at least the context of {context} tokens; serve it with a maximum context "
            f"of {window}, within which the window hides nothing",
        )


def _window(raw: Mapping[str, Any], family: str) -> int | None:
    """Tokens that some layer can look back on; None where every layer sees all."""
    if family == "llama" or raw.get("sliding_window") is None:
        return None
    if family != "mistral":
        layers = integer(raw, "num_hidden_layers")
        full = raw.get("max_window_layers", layers)
        kinds = raw.get("layer_types") or ["sliding_attention"] * (layers - full)
        if not raw.get("use_sliding_window") or "sliding_attention" not in kinds:
            return None
    return integer(raw, "sliding_window")


def _context(raw: Mapping[str, Any], max_context: int | None) -> int:
    positions = integer(raw, "max_position_embeddings")
    if max_context is None:
        return positions
    if not 1 <= max_context <= positions:
        raise refusal("max_context", max_context, f"1 to max_position_embeddings ({positions})")
    return max_context


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters; before, rope_theta stood outside of rope_scaling
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = {"rope_theta": raw.get("rope_theta"), **(raw.get(field) or {})}
    theta = number(rope, "rope_theta", 10_000.0)
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1):
        raise refusal("partial_rotary_factor", rope.get("partial_rotary_factor"), "1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        raise refusal(f"{field}.rope_type", kind, "default or llama3")
    return RopeConfig(
        theta,
        Llama3RopeScaling(
            factor=number(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_context=integer(
                rope, "original_max_position_embeddings", integer(raw, "max_position_embeddings")
            ),
        ),
    )


def _token_ids(raw: Mapping[str, Any]) -> list[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise refusal("eos_token_id", value, "a token id, a list of them, or null")
    return ids
