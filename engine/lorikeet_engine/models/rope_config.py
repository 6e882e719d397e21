"""How config.json says that queries and keys turn with their positions: the rotary embedding."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lorikeet_engine.adapter_format import Family
from lorikeet_engine.adapter_format.base_config import flag, integer, number, numbers, refusal


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Rotary frequencies that are all slowed by `factor`."""

    factor: float


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
class YarnRopeScaling:
    """YaRN's stretched rotary frequencies (arXiv 2309.00071): slow ones are slowed, fast ones kept.

    Frequencies that turn less than beta_slow times in original_context tokens are slowed by
    `factor`, those that turn more than beta_fast times are kept, those between are interpolated
    over their indices; truncate: from and to whole ones.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_context: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE's rotary frequencies (arXiv 2402.13753): each is slowed by a factor of its own."""

    factors: tuple[float, ...]


_LOCAL_THETA = "rope_local_base_freq"
"""The switch of families that turn by another rotary embedding in layers with windows."""
_PER_KIND = {"full_attention", "sliding_attention"}

RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a head's first rotary_dim elements: frequencies theta ** (-2i / it).

    gain: what cosines and sines are multiplied by, and so the queries and keys. interleaved: as
    Family says.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    gain: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class LayerRopes:
    """The rotary embeddings of layers that see all tokens, and of those with sliding windows."""

    full: RopeConfig
    sliding: RopeConfig


def context_of_positions(raw: Mapping[str, Any], family: Family) -> int:
    """Tokens that the rotary embedding is made for: with YaRN, factor times the original ones.

    People switch YaRN on in config.json and leave max_position_embeddings as it was.
    """
    positions = integer(raw, "max_position_embeddings")
    _, rope = _section(raw, family)
    if _kind(rope) != "yarn" or raw.get("model_type") == "phi3":
        return positions
    return max(positions, int(number(rope, "factor") * _original_context(raw, rope)))


def rope_configs(raw: Mapping[str, Any], family: Family, head_dim: int, context: int) -> LayerRopes:
    """Read what config.json says of rotary embeddings, for contexts of up to `context` tokens.

    Raises ModelError.
    """
    name, rope = _section(raw, family)
    theta = number(rope, "rope_theta", number(raw, "rope_theta", 10_000.0))
    full = _rope(raw, family, name, {**rope, "rope_theta": theta}, head_dim, context)
    if _LOCAL_THETA not in family.switches:
        return LayerRopes(full, full)
    name, rope = _local_section(raw)
    theta = number(rope, "rope_theta", number(raw, _LOCAL_THETA))
    local = _rope(raw, family, name, {**rope, "rope_theta": theta}, head_dim, context)
    return LayerRopes(full, local)


def _rope(
    raw: Mapping[str, Any],
    family: Family,
    name: str,
    rope: Mapping[str, Any],
    head_dim: int,
    context: int,
) -> RopeConfig:
    """Read a section of config.json with this name."""
    theta = number(rope, "rope_theta")
    rotary_dim = _rotary_dim(raw, rope, family, head_dim)
    kind = _kind(rope)
    if kind in ("su", "yarn") and "original_max_position_embeddings" in family.switches:
        kind = "longrope"  # as Phi's first checkpoints call it
    plain = RopeConfig(theta, rotary_dim, interleaved=family.interleaved_rope)
    match kind:
        # of text, mrope's three positions are one; dynamic is plain up to max_position_embeddings
        case "default" | "mrope" | "dynamic":
            return plain
        case "linear":
            return replace(plain, scaling=LinearRopeScaling(number(rope, "factor")))
        case "llama3":
            return replace(plain, scaling=_llama3(raw, rope))
        case "yarn":
            return replace(plain, scaling=_yarn(raw, rope), gain=_yarn_gain(name, rope))
        case "longrope":
            return _longrope(raw, rope, plain, context)
    raise refusal(f"{name}.rope_type", kind, "default, linear, dynamic, llama3, yarn or longrope")


def _section(raw: Mapping[str, Any], family: Family) -> tuple[str, Mapping[str, Any]]:
    """What config.json says of the layers that see all tokens."""
    # transformers 5 writes rope_parameters; before, rope_theta stood outside of rope_scaling
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(name) or {}
    if not isinstance(rope, Mapping):
        raise refusal(name, rope, "an object")
    beside = raw.get("rope_scaling")
    if name == "rope_parameters" and beside and beside != rope:
        # transformers takes it instead of rope_parameters, and leaves out the theta written there
        raise refusal("rope_scaling", beside, "that within rope_parameters, which is there too")
    if _LOCAL_THETA in family.switches and _PER_KIND & {*rope}:
        name, rope = f"{name}.full_attention", rope.get("full_attention") or {}
    for key, value in rope.items():
        if isinstance(value, Mapping):  # transformers 5 writes so what differs from layer to layer
            raise refusal(f"{name}.{key}", value, "one rotary embedding for all layers")
    return name, rope


def _local_section(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """What config.json says of the layers with sliding windows, if it says so apart."""
    parameters = raw.get("rope_parameters") or {}
    return "rope_parameters.sliding_attention", parameters.get("sliding_attention") or {}


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _rotary_dim(
    raw: Mapping[str, Any], rope: Mapping[str, Any], family: Family, head_dim: int
) -> int:
    field = "partial_rotary_factor"
    given = rope if rope.get(field) is not None else raw
    share = number(given, field, 1.0)
    if share > 1 or (share != 1 and field not in family.switches):
        raise refusal(field, share, "1" if field not in family.switches else "at most 1")
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2:
        raise refusal(field, share, f"an even number of a head's {head_dim} elements")
    return rotary_dim


def _original_context(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    field = "original_max_position_embeddings"
    if raw.get(field) is not None:  # Phi's stands outside, and is the one that counts
        return integer(raw, field)
    return integer(rope, field, integer(raw, "max_position_embeddings"))


def _llama3(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> Llama3RopeScaling:
    return Llama3RopeScaling(
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_context=_original_context(raw, rope),
    )


def _yarn(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> YarnRopeScaling:
    return YarnRopeScaling(
        factor=number(rope, "factor"),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        truncate=flag(rope, "truncate", default=True),
        original_context=_original_context(raw, rope),
    )


def _yarn_gain(name: str, rope: Mapping[str, Any]) -> float:
    def gain(weight: float) -> float:
        return 0.1 * weight * math.log(max(1.0, number(rope, "factor"))) + 1.0

    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    if number(rope, "attn_factor", 1.0) != 1:
        vllm, transformers = gain(1.0) * rope["attn_factor"], gain(1.0)
        raise refusal(
            f"{name}.attn_factor",
            rope["attn_factor"],
            f"attention_factor in its place: {vllm:.4g} as vLLM, which multiplies the usual "
            f"{transformers:.4g} by it, or {transformers:.4g} as transformers, which has no such "
            "key",
        )
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return gain(number(rope, "mscale")) / gain(number(rope, "mscale_all_dim"))
    return gain(1.0)


def _longrope(
    raw: Mapping[str, Any], rope: Mapping[str, Any], plain: RopeConfig, context: int
) -> RopeConfig:
    """Take the factors for long contexts where the engine serves any, those for short ones else.

    transformers changes from one to the other as a sequence grows, after which the keys that it
    has computed before are turned otherwise than they would be.
    """
    original, pairs = _original_context(raw, rope), plain.rotary_dim // 2
    short, long = (numbers(rope, f"{length}_factor", pairs) for length in ("short", "long"))
    factor = number(rope, "factor", integer(raw, "max_position_embeddings") / original)
    gain = math.sqrt(1.0 + math.log(max(1.0, factor)) / math.log(original))
    scaling = LongRopeScaling(long if context > original else short)
    return replace(plain, scaling=scaling, gain=number(rope, "attention_factor", gain))
