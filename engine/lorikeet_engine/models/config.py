"""A base model's config.json, validated and reduced to the values that the engine needs."""

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
    Quantization,
    QuantizedLinears,
    base_head,
    quantized_linears,
    read_config,
    read_json,
)
from lorikeet_engine.adapter_format.base_config import flag, integer, number, refusal
from lorikeet_engine.adapter_format.families import LayerKind, RecurrentKeys, Width
from lorikeet_engine.kernels.moe import Clamp
from lorikeet_engine.models.kv_groups import KvGroups, KvPlace
from lorikeet_engine.models.rotary import (
    RopeConfig,
    context_of_positions,
    rope_configs,
    yarn_score_gain,
)

_IS_GELU = {"silu": False, "gelu_pytorch_tanh": True}
_AMONG_IMAGES = "vision"  # tokens of one image see one another; those of texts as ever
_IS_SLIDING = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder, and the properties in which model families differ.

    max_context: maximum number of tokens of a sequence.
    ropes: each layer's rotary embedding; None: none.
    windows: number of tokens that each layer's queries attend to, themselves included; None: all.
    kv_groups: groups of layers that share KV pages.
    attention_soft_cap, logits_soft_cap: c of c · tanh(x / c) for attention scores and for logits;
        None: no cap.
    gelu: whether MLPs are gated by GELU instead of SiLU.
    squared_relu: whether MLPs have no gate, and squared ReLU instead of SiLU.
    norms_plus_one: whether norms multiply by 1 + weight.
    labels: number of labels of the model's own head for classification; 0 without one.
    embedding_multiplier: factor of embeddings, rounded to the model's dtype.
    residual_multiplier: factor of the outputs that layers add to hidden states.
    logits_scaling: divisor of logits.
    quantized_linears: stored format of quantised linears; None: floats.
    eos_token_ids: all end-of-sequence ids of config.json and generation_config.json, ascending.
    sinks: whether each head's softmax of attention has one more logit, which is learned and has no
        value (an attention sink).
    value_norm: whether values pass an RMS norm without a weight.
    layer_scalars: whether hidden states are multiplied by a learned number after each layer.
    layer_input_rows: number of tokens that have embeddings for each layer; 0: none has.
    experts_beside: whether layers have a dense MLP, and experts beside it (ExpertKeys.beside).
    attention_scale: factor of attention scores; None: 1 / √head_dim.
    experts_per_token: number of experts that compute a token; 0: MLPs are dense.
    normalised_experts: whether the weights of a token's experts are scaled to add up to 1.
    clamp: clamped activation of experts that have biases, as gpt-oss's; None: that of MLPs.
    sigmoid_scale: factor of the weights of a token's experts, where these are sigmoids
        (ExpertKeys.sigmoid); None: they are of a softmax.
    expert_groups: number of groups of experts, and of those that a token's experts are chosen from.
    conv_bias: whether the convolution of Mamba 2 has a bias.
    time_limits: smallest and largest time step of Mamba 2.
    mtp: place in KV pages of the head for multi-token prediction; None: the model has none, or does
        not use it.
    added_tokens: number of tokens behind the vocabulary that adapters may have of their own.
    """

    shape: BaseShape
    vocab_size: int
    max_context: int
    norm_eps: float
    ropes: tuple[RopeConfig | None, ...]
    windows: tuple[int | None, ...]
    kv_groups: KvGroups
    attention_soft_cap: float | None
    logits_soft_cap: float | None
    gelu: bool
    squared_relu: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    norms: LayerNorms
    norms_plus_one: bool
    qk_norm: QkNormKind
    tied_embeddings: bool
    labels: int
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    quantized_linears: QuantizedLinears | None
    eos_token_ids: tuple[int, ...]
    sinks: bool
    value_norm: bool
    layer_scalars: bool
    layer_input_rows: int
    experts_beside: bool
    attention_scale: float | None
    experts_per_token: int
    normalised_experts: bool
    clamp: Clamp | None
    sigmoid_scale: float | None
    expert_groups: tuple[int, int]
    conv_bias: bool
    time_limits: tuple[float, float]
    mtp: KvPlace | None = None
    added_tokens: int = 0

    @property
    def logits_width(self) -> int:
        """Number of columns of logits: tokens of the vocabulary, and those of adapters alone."""
        return self.vocab_size + self.added_tokens

    def with_mtp(self) -> "ModelConfig":
        """Return this config with a place in KV pages for the head for multi-token prediction."""
        groups = self.kv_groups
        place = KvPlace(0, groups.page_layers)
        return replace(self, kv_groups=replace(groups, page_layers=place.layer + 1), mtp=place)

    def of_mtp(self) -> "ModelConfig":
        """Return the config of a model whose last layer, one more, is that of the MTP head."""
        assert self.mtp is not None, "a model without MTP head"
        shape, groups = self.shape, self.kv_groups
        rope = self.ropes[shape.kinds.index(LayerKind.ATTENTION)]
        return replace(
            self,
            shape=replace(
                shape, layers=shape.layers + 1, kinds=(*shape.kinds, LayerKind.ATTENTION)
            ),
            ropes=(*self.ropes, rope),
            windows=(*self.windows, None),
            kv_groups=replace(groups, places=(*groups.places, self.mtp)),
        )

    @classmethod
    def from_folder(cls, folder: Path, max_context: int | None = None) -> "ModelConfig":
        """Read config.json and, if present, generation_config.json.

        Raises ModelError, whose `field` is the key at fault.

        max_context: limit on the tokens of a sequence, if lower than the number of the model's
            position embeddings; None: that number.
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
        for key, value in family.fixed.items():
            if raw.get(key) not in (None, value):
                raise refusal(key, raw[key], f"{value!r}, or none")
        context = _context(raw, family, max_context)
        if "use_bidirectional_attention" in family.switches:
            _refuse_bidirectional(raw)
        turning = _turning(raw, family, shape.layers)
        sliding = _sliding_layers(raw, family, turning)
        if family.rope_in_windows and raw["sliding_window"] is not None:
            turning = sliding
        if LayerKind.WINDOW in family.kinds:
            _refuse_more_of_gemma4(raw, family)
            sliding = tuple(kind.has_window for kind in shape.kinds)
        return cls(
            shape=shape,
            vocab_size=integer(raw, "vocab_size"),
            max_context=context,
            norm_eps=number(raw, "layer_norm_epsilon")
            if "layer_norm_epsilon" in family.switches
            else number(raw, "rms_norm_eps", 1e-6),
            ropes=_ropes(raw, shape, context, turning, sliding),
            windows=(seen := _windows(raw, sliding, context)),
            kv_groups=KvGroups.of(seen, context, _have_kv(shape), _kv_widths(shape)).read_by(
                [shape.kv_owner(layer) for layer in range(shape.layers)]
            ),
            attention_soft_cap=_soft_cap(raw, family, "attn_logit_softcapping"),
            logits_soft_cap=_soft_cap(raw, family, "final_logit_softcapping"),
            gelu=_is_gelu(raw, family),
            squared_relu="mlp_hidden_act" in family.fixed,
            qkv_bias="qkv" in shape.biased,
            o_bias="o" in shape.biased,
            mlp_bias="down" in shape.biased,
            norms=family.norms,
            norms_plus_one=family.norms_plus_one,
            qk_norm=family.qk_norm,
            tied_embeddings=shape.tied,
            labels=0 if (head := base_head(raw)) is None else len(head.labels),
            embedding_multiplier=math.sqrt(shape.hidden)
            if family.scaled_embeddings
            else _multiplier(raw, family, "embedding_multiplier"),
            residual_multiplier=_multiplier(raw, family, "residual_multiplier"),
            logits_scaling=_multiplier(raw, family, "logits_scaling"),
            quantized_linears=quantized_linears(raw),
            eos_token_ids=eos,
            sinks=family.sinks,
            value_norm=family.value_norm,
            layer_scalars=family.layer_scalars,
            layer_input_rows=_layer_input_rows(raw, shape),
            experts_beside=family.experts is not None and family.experts.beside,
            attention_scale=_own_scale(raw, family),
            experts_per_token=_experts_per_token(raw, shape),
            normalised_experts=_normalised_experts(raw, family),
            clamp=_clamp(raw, family),
            sigmoid_scale=number(raw, "routed_scaling_factor")
            if family.experts and family.experts.sigmoid
            else None,
            expert_groups=_expert_groups(raw, shape),
            conv_bias=_conv_bias(raw, family.recurrent),
            time_limits=_time_limits(raw, family.recurrent),
        )


def _conv_bias(raw: Mapping[str, Any], keys: RecurrentKeys | None) -> bool:
    return keys is not None and keys.conv_bias is not None and flag(raw, keys.conv_bias)


def _time_limits(raw: Mapping[str, Any], keys: RecurrentKeys | None) -> tuple[float, float]:
    """Return the smallest and the largest time step of Mamba 2; (0, ∞) for other families."""
    if keys is None or keys.time_limits is None:
        return 0.0, math.inf
    given = raw[keys.time_limits]
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise refusal(keys.time_limits, given, "a list of two numbers")
    # transformers 5 writes {"__float__": "Infinity"}
    numbers = [math.inf if each == {"__float__": "Infinity"} else each for each in given]
    if any(type(each) not in (int, float) for each in numbers) or not 0 <= numbers[0] < numbers[1]:
        raise refusal(keys.time_limits, given, "two numbers from 0, the larger one last")
    least, most = map(float, numbers)
    return least, most


def _have_kv(shape: BaseShape) -> tuple[bool, ...]:
    return tuple(shape.kind(layer).has_kv for layer in range(shape.layers))


def _kv_widths(shape: BaseShape) -> tuple[int, ...]:
    """Return how many elements a token's keys have in each layer; empty if all layers are alike."""
    if shape.full is None:
        return ()
    heads = map(shape.heads_of, range(shape.layers))
    return tuple(each.kv_heads * each.head_dim for each in heads)


def _multiplier(raw: Mapping[str, Any], family: Family, switch: str) -> float:
    return number(raw, switch) if switch in family.switches else 1.0


def _experts_per_token(raw: Mapping[str, Any], shape: BaseShape) -> int:
    if not shape.experts:
        return 0
    sparse_step, dense_layers = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers")
    if sparse_step != 1:
        raise refusal("decoder_sparse_step", sparse_step, "1: experts in every layer")
    if dense_layers:
        raise refusal("mlp_only_layers", dense_layers, "an empty list: experts in every layer")
    stored = quantized_linears(raw)
    keys = FAMILIES[shape.family].experts
    known = Quantization.MXFP4 if keys and keys.clamped else Quantization.FP8
    if stored is not None and stored.format is not known:
        want = f"experts of floats or of {known.name}"
        raise refusal("quantization_config", stored.format.value, want)
    field = keys.per_token if keys else ""
    chosen = integer(raw, field)
    if chosen > shape.experts:
        raise refusal(field, chosen, f"at most the {shape.experts} experts")
    return chosen


def _normalised_experts(raw: Mapping[str, Any], family: Family) -> bool:
    if family.experts is None:
        return False
    return family.experts.normalised or flag(raw, "norm_topk_prob")


def _expert_groups(raw: Mapping[str, Any], shape: BaseShape) -> tuple[int, int]:
    """Return the number of groups of experts, and of groups that a token's experts are chosen from;
    (1, 1) for families without groups.

    Raises ModelError if config.json's numbers do not fit together.
    """
    if "n_group" not in FAMILIES[shape.family].switches:
        return 1, 1
    groups, kept = integer(raw, "n_group"), integer(raw, "topk_group")
    if shape.experts % groups or (groups > 1 and shape.experts < 2 * groups):
        want = f"a number of equal groups, of two or more of the {shape.experts} experts"
        raise refusal("n_group", groups, want)
    if (
        not integer(raw, "num_experts_per_tok") * groups
        <= kept * shape.experts
        <= (groups * shape.experts)
    ):
        want = f"at most n_group ({groups}), and as many as have num_experts_per_tok experts"
        raise refusal("topk_group", kept, want)
    return groups, kept


def _clamp(raw: Mapping[str, Any], family: Family) -> Clamp | None:
    if family.experts is None or not family.experts.clamped:
        return None
    return Clamp(number(raw, "swiglu_alpha"), number(raw, "swiglu_limit"))


def _soft_cap(raw: Mapping[str, Any], family: Family, switch: str) -> float | None:
    if switch not in family.switches or raw[switch] is None:
        return None
    return number(raw, switch)


def _is_gelu(raw: Mapping[str, Any], family: Family) -> bool:
    key = "hidden_activation" if "hidden_activation" in family.switches else "hidden_act"
    activation = raw.get(key, "silu")
    if "mlp_hidden_act" in family.fixed or "hidden_act" in family.fixed:
        return False
    is_silu = family.recurrent is not None or "swiglu_limit" in family.switches
    known = ("silu",) if is_silu else tuple(_IS_GELU)
    if activation not in known:
        raise refusal(key, activation, " or ".join(known))
    return _IS_GELU[activation]


def _refuse_bidirectional(raw: Mapping[str, Any]) -> None:
    value = raw["use_bidirectional_attention"]
    if value not in (None, False, _AMONG_IMAGES):
        raise refusal("use_bidirectional_attention", value, "false: tokens see what is before them")


def _refuse_more_of_gemma4(raw: Mapping[str, Any], family: Family) -> None:
    """Raise ModelError for parts of Gemma 4's models that no published model has together.

    Embeddings of each layer, layers that share keys and values, and values of their own in layers
    without a window are parts of E2B and E4B; larger models have none of these.
    """
    is_e = bool(family.outer)
    if flag(raw, "attention_k_eq_v") is is_e:
        want = "false beside hidden_size_per_layer_input" if is_e else "true, but in E2B and E4B"
        raise refusal("attention_k_eq_v", is_e, want)
    for field in () if is_e else ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if field in family.switches and raw[field]:
            raise refusal(field, raw[field], "0: only Gemma 4 E2B and E4B have it")


def _layer_input_rows(raw: Mapping[str, Any], shape: BaseShape) -> int:
    """Return the number of tokens that have embeddings for each layer; 0: none has.

    Raises ModelError if these are fewer than the vocabulary's.

    raw: content of config.json.
    """
    if not shape.layer_input:
        return 0
    rows = integer(raw, "vocab_size_per_layer_input")
    if rows < shape.vocabulary:
        want = f"at least vocab_size ({shape.vocabulary})"
        raise refusal("vocab_size_per_layer_input", rows, want)
    return rows


def _ropes(
    raw: Mapping[str, Any],
    shape: BaseShape,
    context: int,
    turning: tuple[bool, ...],
    sliding: tuple[bool, ...],
) -> tuple[RopeConfig | None, ...]:
    family = FAMILIES[shape.family]
    if not any(turning):
        return (None,) * shape.layers  # transformers reads no key of the rotary embedding either
    ropes = rope_configs(raw, family, shape, context)
    if _own_scale(raw, family) is not None:
        own = zip(turning, sliding, strict=True)
        return tuple((ropes.sliding if s else ropes.full) if turns else None for turns, s in own)
    # Attention divides by √head_dim; another scale is split evenly into queries' and keys' gains.
    scale = math.sqrt(_attention_scale(raw, family, shape.head_dim) * math.sqrt(shape.head_dim))
    full, local = (replace(rope, gain=rope.gain * scale) for rope in (ropes.full, ropes.sliding))
    return tuple(
        (local if slides else full) if turns else None
        for turns, slides in zip(turning, sliding, strict=True)
    )


def _own_scale(raw: Mapping[str, Any], family: Family) -> float | None:
    """Return the factor of attention scores for families whose attention applies it itself; else
    None.

    With None, attention multiplies by 1 / √head_dim, and the rest of the factor is part of the
    rotary embeddings.
    """
    if "position_embedding_type" in family.switches:
        return number(raw, "attention_multiplier")
    if Width.KV_LATENT in family.switches:
        width = integer(raw, "qk_nope_head_dim") + integer(raw, "qk_rope_head_dim")
        return yarn_score_gain(raw, family) / math.sqrt(width)
    return family.attention_scale


def _attention_scale(raw: Mapping[str, Any], family: Family, head_dim: int) -> float:
    """Return the factor of attention scores, 1 / √head_dim unless config.json has another.

    raw: content of config.json.
    """
    if "attention_multiplier" in family.switches:
        return number(raw, "attention_multiplier")
    if "query_pre_attn_scalar" in family.switches:
        head_dim = integer(raw, "query_pre_attn_scalar")
    return 1.0 / math.sqrt(head_dim)


def _turning(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Return whether each layer has a rotary embedding.

    raw: content of config.json.
    """
    if family.alone:
        return (False,) * layers
    if "position_embedding_type" in family.switches:
        kind = raw["position_embedding_type"]
        if kind not in (None, "nope", "rope"):
            raise refusal("position_embedding_type", kind, "rope, nope or null")
        return (kind == "rope",) * layers
    if "no_rope_layers" not in family.switches:
        return (True,) * layers
    given = raw["no_rope_layers"]  # 1 for a layer with the rotary embedding, 0 for one without
    if given is None:
        interval = integer(raw, "no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(given, list) or len(given) < layers or not {*given} <= {0, 1}:
        raise refusal("no_rope_layers", given, f"a list of {layers} of 0 and 1")
    return tuple(map(bool, given[:layers]))


def _windows(
    raw: Mapping[str, Any], sliding: tuple[bool, ...], context: int
) -> tuple[int | None, ...]:
    """Return each layer's window in tokens, a query's own token included; None: no window.

    A window as long as the longest sequence excludes nothing, so it becomes None. Raises ModelError
    if sliding_window is neither null nor a positive integer.

    raw: content of config.json.
    sliding: whether each layer has a sliding window.
    context: maximum number of tokens of a sequence.
    """
    if not any(sliding) or raw["sliding_window"] is None:
        return (None,) * len(sliding)
    window = integer(raw, "sliding_window")
    return tuple(window if slides and window < context else None for slides in sliding)


def _sliding_layers(
    raw: Mapping[str, Any], family: Family, turning: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Return whether each layer has a sliding window, if config.json gives the window's size.

    Raises ModelError if a key of config.json that selects these layers has a bad value.

    turning: whether each layer has a rotary embedding.
    """
    layers, switches = range(len(turning)), family.switches
    if "sliding_window" not in switches:
        return (False,) * len(layers)
    if "use_sliding_window" in switches and not flag(raw, "use_sliding_window"):
        return (False,) * len(layers)
    if "layer_types" in switches and raw["layer_types"] is not None:
        return _sliding_by_kind(raw["layer_types"], len(layers))
    if family.sinks:
        return tuple(layer % 2 == 0 for layer in layers)
    if "sliding_window_pattern" in switches:
        every = integer(raw, "sliding_window_pattern")
        return tuple((layer + 1) % every != 0 for layer in layers)
    if "max_window_layers" in switches:
        return tuple(layer >= raw["max_window_layers"] for layer in layers)
    if "no_rope_layers" in switches:
        return tuple(not turns for turns in turning)
    return (True,) * len(layers)


def _sliding_by_kind(kinds: object, layers: int) -> tuple[bool, ...]:
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {*_IS_SLIDING}:
        raise refusal("layer_types", kinds, f"a list of {layers} of {' and '.join(_IS_SLIDING)}")
    return tuple(_IS_SLIDING[kind] for kind in kinds)


def _context(raw: Mapping[str, Any], family: Family, max_context: int | None) -> int:
    positions = context_of_positions(raw, family)
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
