"""What a base model's config.json says, checked and reduced to what the engine needs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorikeet_engine.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
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
class Rope:
    """Rotary embedding over the whole head: frequencies theta ** (-2i / head_dim)."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model of the Llama family: its sizes and in what the families differ.

    hidden, intermediate, head_dim: widths in elements. max_context: tokens. eos_token_ids: every
    end-of-sequence id of config.json and generation_config.json, in rising order.
    """

    family: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path, max_context: int | None = None) -> "ModelConfig":
        """Read config.json and, if present, generation_config.json.

        max_context: serve fewer tokens than the model's position embeddings allow; this also
        makes room for a model whose sliding window is at least that long. Raises ModelError,
        whose `field` names the key at fault.
        """
        raw = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        more = _read_json(generation) if generation.exists() else {}
        eos = {*_token_ids(raw), *_token_ids(more)}
        return cls._parse(raw, tuple(sorted(eos)), max_context)

    @classmethod
    def _parse(
        cls, raw: Mapping[str, Any], eos: tuple[int, ...], max_context: int | None
    ) -> "ModelConfig":
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise _refusal("model_type", family, f"one of {', '.join(FAMILIES)}")
        context = _context(raw, max_context)
        _refuse_unsupported(raw, family, context)
        heads = _integer(raw, "num_attention_heads")
        kv_heads = _integer(raw, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise _refusal("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
        hidden = _integer(raw, "hidden_size")
        head_dim = _integer(raw, "head_dim", hidden // heads)
        if head_dim % 2:
            raise _refusal("head_dim", head_dim, "an even number")
        bias = family in ("llama", "qwen3") and bool(raw.get("attention_bias"))
        return cls(
            family=family,
            vocab_size=_integer(raw, "vocab_size"),
            hidden=hidden,
            intermediate=_integer(raw, "intermediate_size"),
            layers=_integer(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_context=context,
            norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope=_rope(raw),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias")),
            qk_norm=family == "qwen3",
            tied_embeddings=bool(raw.get("tie_word_embeddings")),
            eos_token_ids=eos,
        )


def _refuse_unsupported(raw: Mapping[str, Any], family: str, context: int) -> None:
    if raw.get("quantization_config") is not None:
        raise _refusal(
            "quantization_config", "{…}", "null and weights in float32, float16 or bfloat16"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise _refusal("hidden_act", raw["hidden_act"], "silu")
    window = _window(raw, family)
    if window is not None and window < context:
        raise _refusal(
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
        layers = _integer(raw, "num_hidden_layers")
        full = raw.get("max_window_layers", layers)
        kinds = raw.get("layer_types") or ["sliding_attention"] * (layers - full)
        if not raw.get("use_sliding_window") or "sliding_attention" not in kinds:
            return None
    return _integer(raw, "sliding_window")


def _context(raw: Mapping[str, Any], max_context: int | None) -> int:
    positions = _integer(raw, "max_position_embeddings")
    if max_context is None:
        return positions
    if not 1 <= max_context <= positions:
        raise _refusal("max_context", max_context, f"1 to max_position_embeddings ({positions})")
    return max_context


def _rope(raw: Mapping[str, Any]) -> Rope:
    # transformers 5 writes rope_parameters; before, rope_theta stood outside of rope_scaling
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = {"rope_theta": raw.get("rope_theta"), **(raw.get(field) or {})}
    theta = _number(rope, "rope_theta", 10_000.0)
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1):
        raise _refusal("partial_rotary_factor", rope.get("partial_rotary_factor"), "1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise _refusal(f"{field}.rope_type", kind, "default or llama3")
    return Rope(
        theta,
        Llama3Scaling(
            factor=_number(rope, "factor"),
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
            original_context=_integer(
                rope, "original_max_position_embeddings", _integer(raw, "max_position_embeddings")
            ),
        ),
    )


def _token_ids(raw: Mapping[str, Any]) -> list[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise _refusal("eos_token_id", value, "a token id, a list of them, or null")
    return ids


def _integer(raw: Mapping[str, Any], field: str, absent: int | None = None) -> int:
    value = raw.get(field)
    value = absent if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refusal(field, value, "a positive integer")
    return value


def _number(raw: Mapping[str, Any], field: str, absent: float | None = None) -> float:
    value = raw.get(field)
    value = absent if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise _refusal(field, value, "a positive number")
    return float(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist: want a folder with a Hugging Face checkpoint", field=path.name
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}", field=path.name) from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds no JSON object", field=path.name)
    return raw


def _refusal(field: str, value: object, want: str) -> ModelError:
    return ModelError(f"config.json: {field}={value!r}: want {want}", field=field)
