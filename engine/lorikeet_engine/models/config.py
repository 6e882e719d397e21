"""What a base model's config.json says, checked and reduced to what the engine needs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lorikeet_engine.adapter_format import (
    FAMILIES,
    BaseShape,
    Family,
    LayerNorms,
    QkNormKind,
    QuantizedLinears,
    quantized_linears,
    read_config,
    read_json,
)
from lorikeet_engine.adapter_format.base_config import flag, integer, number, refusal
from lorikeet_engine.models.rope_config import RopeConfig, context_of_positions, rope_config


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: its sizes and in what the families differ.

    max_context: tokens. rope_layers: whether each layer turns queries and keys. Embeddings are
    multiplied by embedding_multiplier, what a layer adds to them by residual_multiplier, and logits
    divided by logits_scaling. quantized_linears: how they are stored if they are.
    eos_token_ids: every end-of-sequence id of config.json and generation_config.json, in rising
    order. experts_per_token: that compute a token, 0 where MLPs are dense; normalised_experts:
    whether their weights add up to 1.
    """

    shape: BaseShape
    vocab_size: int
    max_context: int
    norm_eps: float
    rope: RopeConfig
    rope_layers: tuple[bool, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    norms: LayerNorms
    qk_norm: QkNormKind
    tied_embeddings: bool
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    quantized_linears: QuantizedLinears | None
    eos_token_ids: tuple[int, ...]
    experts_per_token: int
    normalised_experts: bool

    @classmethod
    def from_folder(cls, folder: Path, max_context: int | None = None) -> "ModelConfig":
        """Read config.json and, if present, generation_config.json.

        max_context: serve fewer tokens than the model's position embeddings allow; this also
        makes room for a model whose sliding window is at least that long. Raises ModelError,
        whose `field` names the key at fault.
        """
        raw = read_config(folder)
        generation = folder / "generation_config.json"
        more = read_json(generation) if generation.exists() else {}
        eos = {*_token_ids(raw), *_token_ids(more)}
        return cls._parse(raw, tuple(sorted(eos)), max_context)

    @classmethod
    def _parse(
        cls, raw: Mapping[str, Any], eos: tuple[int, ...], max_context: int | None
    ) -> "ModelConfig":
        shape = BaseShape.from_config(raw)
        family = FAMILIES[shape.family]
        raw = {**family.switches, **raw}
        context = _context(raw, max_context)
        _refuse_unsupported(raw, family, context)
        return cls(
            shape=shape,
            vocab_size=integer(raw, "vocab_size"),
            max_context=context,
            norm_eps=number(raw, "rms_norm_eps", 1e-6),
            rope=_rope(raw, shape, context),
            rope_layers=_rope_layers(raw, family, shape.layers),
            qkv_bias=family.qkv_bias or _flag(raw, family, "attention_bias"),
            o_bias=family.o_bias is not None and _flag(raw, family, family.o_bias),
            mlp_bias=_flag(raw, family, "mlp_bias"),
            norms=family.norms,
            qk_norm=family.qk_norm,
            tied_embeddings=shape.tied,
            embedding_multiplier=_multiplier(raw, family, "embedding_multiplier"),
            residual_multiplier=_multiplier(raw, family, "residual_multiplier"),
            logits_scaling=_multiplier(raw, family, "logits_scaling"),
            quantized_linears=quantized_linears(raw),
            eos_token_ids=eos,
            experts_per_token=_experts_per_token(raw, shape),
            normalised_experts=_normalised_experts(raw, family),
        )


def _flag(raw: Mapping[str, Any], family: Family, switch: str) -> bool:
    """A switch of the family's; others write keys of families that they took a file over from."""
    return switch in family.switches and flag(raw, switch)


def _multiplier(raw: Mapping[str, Any], family: Family, switch: str) -> float:
    return number(raw, switch) if switch in family.switches else 1.0


def _refuse_unsupported(raw: Mapping[str, Any], family: Family, context: int) -> None:
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


def _experts_per_token(raw: Mapping[str, Any], shape: BaseShape) -> int:
    if not shape.experts:
        return 0
    sparse_step, dense_layers = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers")
    if sparse_step != 1:
        raise refusal("decoder_sparse_step", sparse_step, "1: experts in every layer")
    if dense_layers:
        raise refusal("mlp_only_layers", dense_layers, "an empty list: experts in every layer")
    stored = quantized_linears(raw)
    if stored is not None:
        raise refusal("quantization_config", stored.format, "experts of floats")
    chosen = integer(raw, "num_experts_per_tok")
    if chosen > shape.experts:
        raise refusal("num_experts_per_tok", chosen, f"at most the {shape.experts} experts")
    return chosen


def _normalised_experts(raw: Mapping[str, Any], family: Family) -> bool:
    if family.experts is None:
        return False
    return family.experts.normalised or flag(raw, "norm_topk_prob")


def _window(raw: Mapping[str, Any], family: Family) -> int | None:
    """Tokens that some layer can look back on; None where every layer sees all."""
    if "sliding_window" not in family.switches or raw["sliding_window"] is None:
        return None
    if "use_sliding_window" in family.switches:
        kinds = raw.get("layer_types")
        if kinds is None and "max_window_layers" in family.switches:
            full = raw["max_window_layers"]
            kinds = ["sliding_attention"] * (integer(raw, "num_hidden_layers") - full)
        if not raw["use_sliding_window"]:
            return None
        if kinds is not None and "sliding_attention" not in kinds:
            return None
    return integer(raw, "sliding_window")


def _rope(raw: Mapping[str, Any], shape: BaseShape, context: int) -> RopeConfig:
    family = FAMILIES[shape.family]
    rope = rope_config(raw, family, shape.head_dim, context)
    if "attention_multiplier" not in family.switches:
        return rope
    # attention divides by √head_dim: what is wanted instead goes half into queries, half into keys
    scale = number(raw, "attention_multiplier") * math.sqrt(shape.head_dim)
    return replace(rope, gain=rope.gain * math.sqrt(scale))


def _rope_layers(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    if "no_rope_layers" not in family.switches:
        return (True,) * layers
    given = raw["no_rope_layers"]  # 1 for a layer with the rotary embedding, 0 for one without
    if given is None:
        interval = integer(raw, "no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(given, list) or len(given) < layers or not {*given} <= {0, 1}:
        raise refusal("no_rope_layers", given, f"a list of {layers} of 0 and 1")
    return tuple(map(bool, given[:layers]))


def _context(raw: Mapping[str, Any], max_context: int | None) -> int:
    positions = context_of_positions(raw)
    if max_context is None:
        return positions
    if not 1 <= max_context <= positions:
        raise refusal("max_context", max_context, f"1 to max_position_embeddings ({positions})")
    return max_context


def _token_ids(raw: Mapping[str, Any]) -> list[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise refusal("eos_token_id", value, "a token id, a list of them, or null")
    return ids
