"""Rotary embeddings: those of config.json, and their angles at every position."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lorikeet_engine.adapter_format import BaseShape, Family
from lorikeet_engine.adapter_format.base_config import flag, integer, number, numbers, refusal


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Scaling of rotary embeddings that divides all frequencies by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's scaled rotary frequencies: low ones are divided by `factor`, high ones kept.

    Frequencies with wavelengths above original_context / low_freq_factor are divided by `factor`.
    Frequencies with wavelengths below original_context / high_freq_factor are kept. Frequencies
    between the two are interpolated.

    original_context: tokens of the context that the model had before scaling.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """YaRN's scaled rotary frequencies (arXiv 2309.00071): low ones are divided, high ones kept.

    Frequencies with fewer than beta_slow rotations in original_context tokens are divided by
    `factor`. Frequencies with more than beta_fast rotations are kept. Frequencies between the two
    are interpolated over their indices.

    original_context: tokens of the context that the model had before scaling.
    truncate: whether the interpolation's bounds are rounded to whole indices.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_context: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE's rotary frequencies (arXiv 2402.13753): each is divided by its own factor.

    factors: one for each frequency.
    """

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ProportionalRopeScaling:
    """Gemma 4's rotary frequencies: theta ** (-2i / head_dim), divided by `factor`.

    Pairs are (x[i], x[i + head_dim / 2]), of which only the first rotary_dim / 2 are rotated.
    """

    head_dim: int
    factor: float


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Growth of queries with their position p: times 1 + beta · ln(1 + ⌊p / original_context⌋).

    original_context: tokens of the context that the model had before scaling.
    """

    beta: float
    original_context: int


_BETA = "llama_4_scaling_beta"
_LOCAL_THETA = "rope_local_base_freq"
"""Key of config.json in model families whose sliding-window layers have another RoPE theta."""
_PAIRS = "rope_interleave"
_FILLED = ("llama3", "longrope", "yarn")
"""Kinds of rotary embeddings whose original context transformers takes from config.json's top."""
_PER_KIND = {"full_attention", "sliding_attention"}

RopeScaling = (
    LinearRopeScaling
    | Llama3RopeScaling
    | YarnRopeScaling
    | LongRopeScaling
    | ProportionalRopeScaling
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a head's first rotary_dim elements.

    Unscaled frequencies are theta ** (-2i / rotary_dim).

    scaling: change of the frequencies; None: unscaled.
    gain: factor of cosines and sines, and so of queries and keys.
    interleaved: whether neighbouring elements are rotated, instead of x[i] with x[i + half].
    queries: growth of queries with their position; None: none.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    gain: float = 1.0
    interleaved: bool = False
    queries: QueryScaling | None = None

    @property
    def spans_head(self) -> bool:
        """Whether pairs are (x[i], x[i + head_dim / 2]) even if only some are rotated."""
        return isinstance(self.scaling, ProportionalRopeScaling)


@dataclass(frozen=True, slots=True)
class LayerRopes:
    """Rotary embeddings of layers without a window (full), and of layers with sliding windows."""

    full: RopeConfig
    sliding: RopeConfig


def context_of_positions(raw: Mapping[str, Any], family: Family) -> int:
    """Return the number of positions that the rotary embedding supports.

    With YaRN this is at least `factor` times the original context, since many config.json files
    leave max_position_embeddings at its original value.

    raw: content of config.json.
    """
    positions = integer(raw, "max_position_embeddings")
    if {*family.rope_parameters} >= _PER_KIND:
        return positions
    _, rope = _section(raw, family)
    if _kind(rope) != "yarn" or raw.get("model_type") == "phi3":
        return positions
    return max(positions, int(number(rope, "factor") * _original_context(raw, rope)))


def rope_configs(
    raw: Mapping[str, Any], family: Family, shape: BaseShape, context: int
) -> LayerRopes:
    """Parse config.json's rotary embeddings.

    Raises ModelError if one of their keys has a value that cannot be served.

    raw: content of config.json.
    context: maximum number of tokens of a context that the engine serves.
    """
    head_dim = shape.head_dim if shape.latents is None else shape.latents.rotary
    if {*family.rope_parameters} >= _PER_KIND:
        full_dim = shape.full.head_dim if shape.full is not None else head_dim
        ropes = (
            _rope(raw, family, *_section_of_kind(raw, family, kind), width, context)
            for kind, width in (("full_attention", full_dim), ("sliding_attention", head_dim))
        )
        return LayerRopes(*ropes)
    name, rope = _section(raw, family)
    theta = number(rope, "rope_theta", number(raw, "rope_theta", 10_000.0))
    full = _rope(raw, family, name, {**rope, "rope_theta": theta}, head_dim, context)
    if _LOCAL_THETA not in family.switches:
        return LayerRopes(full, full)
    name, rope = _local_section(raw)
    theta = number(rope, "rope_theta", number(raw, _LOCAL_THETA))
    local = _rope(raw, family, name, {**rope, "rope_theta": theta}, head_dim, context)
    return LayerRopes(full, local)


def yarn_score_gain(raw: Mapping[str, Any], family: Family) -> float:
    """Return the factor by which config.json's RoPE section multiplies attention scores.

    It is DeepSeek's YaRN that does so, in addition to the factor of cosines and sines; 1 without.

    raw: content of config.json.
    """
    _, rope = _section(raw, family)
    if _kind(rope) == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return _gain(rope, number(rope, "mscale_all_dim")) ** 2


@dataclass(frozen=True, slots=True)
class Turns:
    """Cosines and sines of the rotary angles at some positions, times RopeConfig.gain.

    cos, sin [positions, rotary_dim / 2] float32.
    query_gain [positions] float32: factor of queries; None: 1.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_gain: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> "Turns":
        """Return the cosines, sines and query gains at some positions [tokens] int64."""
        gain = None if self.query_gain is None else self.query_gain[positions]
        return Turns(self.cos[positions], self.sin[positions], gain)


class RotaryEmbeddings:
    """Cosines and sines of the rotary angles, for each rotary embedding of a model's layers.

    positions: number of positions, from 0 on, for which they are computed.
    """

    def __init__(
        self, ropes: Iterable[RopeConfig | None], positions: int, device: torch.device
    ) -> None:
        distinct = dict.fromkeys(rope for rope in ropes if rope is not None)
        self._turns = {rope: _turns(rope, positions, device) for rope in distinct}

    def at(self, positions: torch.Tensor) -> dict[RopeConfig | None, Turns]:
        """Look up cosines and sines at positions [tokens] int64, for each rotary embedding.

        The key None is for layers without rotary embedding; its tensors have no columns.
        """
        nothing = torch.empty(len(positions), 0, device=positions.device)
        at: dict[RopeConfig | None, Turns] = {None: Turns(nothing, nothing)}
        for rope, turns in self._turns.items():
            at[rope] = turns.at(positions)
        return at


def _gain(rope: Mapping[str, Any], weight: float) -> float:
    return 0.1 * weight * math.log(max(1.0, number(rope, "factor"))) + 1.0


def _rope(
    raw: Mapping[str, Any],
    family: Family,
    name: str,
    rope: Mapping[str, Any],
    head_dim: int,
    context: int,
) -> RopeConfig:
    """Parse one RoPE section of config.json.

    name: name of the section, for errors.
    rope: content of the section, with its rope_theta.
    context: maximum number of tokens of a context that the engine serves.
    """
    theta = number(rope, "rope_theta")
    rotary_dim = _rotary_dim(raw, rope, family, head_dim)
    kind = _kind(rope)
    if kind in ("su", "yarn") and "original_max_position_embeddings" in family.switches:
        kind = "longrope"  # Phi's first checkpoints call it su or yarn
    queries = _query_scaling(raw, family, name, rope, context)
    interleaved = family.interleaved_rope or (_PAIRS in family.switches and flag(raw, _PAIRS))
    plain = RopeConfig(theta, rotary_dim, interleaved=interleaved, queries=queries)
    match kind:
        # for text, mrope's three positions are equal; dynamic is unscaled up to
        # max_position_embeddings
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
        case "proportional" if {*family.rope_parameters} >= _PER_KIND:
            factor = number(rope, "factor", 1.0)
            return replace(plain, scaling=ProportionalRopeScaling(head_dim, factor))
    raise refusal(f"{name}.rope_type", kind, "default, linear, dynamic, llama3, yarn or longrope")


def _section(raw: Mapping[str, Any], family: Family) -> tuple[str, Mapping[str, Any]]:
    """Return name and content of config.json's RoPE section for layers without a window."""
    # transformers 5 writes rope_parameters; before, rope_theta was outside of rope_scaling
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(name) or family.rope_parameters
    if not isinstance(rope, Mapping):
        raise refusal(name, rope, "an object")
    beside = raw.get("rope_scaling")
    if name == "rope_parameters" and beside and beside != rope:
        # transformers uses rope_scaling then, and ignores rope_parameters' theta
        raise refusal("rope_scaling", beside, "that within rope_parameters, which is there too")
    if _LOCAL_THETA in family.switches and _PER_KIND & {*rope}:
        name, rope = f"{name}.full_attention", rope.get("full_attention") or {}
    for key, value in rope.items():
        if isinstance(value, Mapping):  # transformers 5 nests sections that differ between layers
            raise refusal(f"{name}.{key}", value, "one rotary embedding for all layers")
    return name, rope


def _section_of_kind(
    raw: Mapping[str, Any], family: Family, kind: str
) -> tuple[str, Mapping[str, Any]]:
    """Return name and content of the RoPE section of one kind of layers, which must have its own.

    kind: the kind of layers, as in layer_types.
    """
    if raw.get("rope_scaling"):
        raise refusal("rope_scaling", raw["rope_scaling"], "rope_parameters in its place")
    sections = raw.get("rope_parameters") or family.rope_parameters
    own = sections.get(kind) if isinstance(sections, Mapping) else None
    if not isinstance(own, Mapping):
        raise refusal("rope_parameters", sections, f"an object with a section {kind}")
    return f"rope_parameters.{kind}", own


def _local_section(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return name and content of config.json's RoPE section for sliding-window layers.

    The content is empty if there is no such section.
    """
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
    is_read = field in family.switches or _kind(rope) == "proportional"
    if share > 1 or (share != 1 and not is_read):
        raise refusal(field, share, "at most 1" if is_read else "1")
    rotary_dim = int(head_dim * share)
    if _kind(rope) == "proportional":
        return 2 * int(share * head_dim // 2)
    if rotary_dim % 2:
        raise refusal(field, share, f"an even number of a head's {head_dim} elements")
    return rotary_dim


def _original_context(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    field = "original_max_position_embeddings"
    if raw.get(field) is not None:  # Phi's is outside of the section, and takes precedence
        return integer(raw, field)
    return integer(rope, field, integer(raw, "max_position_embeddings"))


def _query_scaling(
    raw: Mapping[str, Any], family: Family, name: str, rope: Mapping[str, Any], context: int
) -> QueryScaling | None:
    """Parse the factors of queries that grow with their position, as in Llama 4 and Ministral 3.

    Returns None if the factor is 1 at all positions within `context`.

    raw: content of config.json.
    name: name of its RoPE section, for errors.
    rope: content of the section.
    context: maximum number of tokens of a context that the engine serves.
    """
    beta = rope.get(_BETA)
    if _BETA not in family.rope_parameters:
        if beta:
            raise refusal(f"{name}.{_BETA}", beta, "none: model_type ministral3 alone reads it")
        return None
    if beta is None:
        raise refusal(f"{name}.{_BETA}", beta, "a number; 0 if queries shall not grow")
    field = "original_max_position_embeddings"
    if beta and _kind(rope) not in _FILLED and rope.get(field) is None:
        # transformers takes max_position_embeddings for it in the other kinds alone
        raise refusal(f"{name}.{field}", None, f"the tokens behind which queries grow by {_BETA}")
    original = _original_context(raw, rope)
    if beta == 0 or context <= original:
        return None
    return QueryScaling(number(rope, _BETA), original)


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
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    if number(rope, "attn_factor", 1.0) != 1:
        vllm, transformers = _gain(rope, 1.0) * rope["attn_factor"], _gain(rope, 1.0)
        raise refusal(
            f"{name}.attn_factor",
            rope["attn_factor"],
            f"attention_factor in its place: {vllm:.4g} as vLLM, which multiplies the usual "
            f"{transformers:.4g} by it, or {transformers:.4g} as transformers, which has no such "
            "key",
        )
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _gain(rope, number(rope, "mscale")) / _gain(rope, number(rope, "mscale_all_dim"))
    return _gain(rope, 1.0)


def _longrope(
    raw: Mapping[str, Any], rope: Mapping[str, Any], plain: RopeConfig, context: int
) -> RopeConfig:
    """Parse LongRoPE: two lists of factors, one for contexts up to the original context, one for
    longer contexts.

    The long factors are used for all sequences if the engine serves more than the original context;
    transformers instead switches as a sequence grows.

    raw: content of config.json. rope: content of its RoPE section.
    plain: the rotary embedding without scaling.
    context: maximum number of tokens of a context that the engine serves.
    """
    original, pairs = _original_context(raw, rope), plain.rotary_dim // 2
    short, long = (numbers(rope, f"{length}_factor", pairs) for length in ("short", "long"))
    factor = number(rope, "factor", integer(raw, "max_position_embeddings") / original)
    gain = math.sqrt(1.0 + math.log(max(1.0, factor)) / math.log(original))
    scaling = LongRopeScaling(long if context > original else short)
    return replace(plain, scaling=scaling, gain=number(rope, "attention_factor", gain))


def _turns(rope: RopeConfig, positions: int, device: torch.device) -> Turns:
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * _frequencies(rope)
    cos, sin = angles.cos() * rope.gain, angles.sin() * rope.gain
    gain = None if rope.queries is None else _query_gain(rope.queries, positions).to(device)
    return Turns(cos.to(device), sin.to(device), gain)


def _query_gain(scaling: QueryScaling, positions: int) -> torch.Tensor:
    spans = torch.arange(positions) // scaling.original_context
    return 1.0 + scaling.beta * torch.log(1.0 + spans)


def _frequencies(rope: RopeConfig) -> torch.Tensor:
    if isinstance(rope.scaling, ProportionalRopeScaling):
        head_dim, factor = rope.scaling.head_dim, rope.scaling.factor
        exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / rope.theta**exponents / factor
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    waves = rope.theta**exponents  # [rotary_dim / 2]
    # computed in the reference's order: a rounding error here grows with the position
    match rope.scaling:
        case None:
            return 1.0 / waves
        case LinearRopeScaling(factor):
            return 1.0 / waves / factor
        case Llama3RopeScaling() as llama3:
            return _stretch(1.0 / waves, llama3)
        case YarnRopeScaling() as yarn:
            kept = _kept(rope, yarn)
            return 1.0 / (yarn.factor * waves) * (1.0 - kept) + 1.0 / waves * kept
        case LongRopeScaling(factors):
            return 1.0 / (torch.tensor(factors) * waves)


def _stretch(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    turns = scaling.original_context / (2 * math.pi / frequencies)  # in the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 0: divided by factor, 1: unchanged
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies


def _kept(rope: RopeConfig, yarn: YarnRopeScaling) -> torch.Tensor:
    """Return how much of each frequency YaRN keeps unscaled, from 0 to 1: [rotary_dim / 2]."""

    def index(turns: float) -> float:
        """Return the fractional index of the frequency that makes `turns` rotations in
        original_context tokens.
        """
        per_turn = yarn.original_context / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(per_turn) / (2 * math.log(rope.theta))

    first, last = index(yarn.beta_fast), index(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first or 0.001
    indices = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    return 1.0 - ((indices - first) / width).clamp(0.0, 1.0)
