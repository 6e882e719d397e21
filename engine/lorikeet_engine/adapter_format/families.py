"""The families of base models: the linears that adapters can change, and in what else they differ.

A new family of decoders needs an entry of FAMILIES here: names, widths, images, the table and the
model's products follow from its linears, and models/config.py reads the switches that it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Width(StrEnum):
    """What a linear reads or writes, by the key of config.json that counts its pieces.

    Processes that share a linear cut it between pieces.
    """

    HIDDEN = "hidden_size"
    QUERIES = "num_attention_heads"
    KEYS = "num_key_value_heads"  # and as wide: values
    INTERMEDIATE = "intermediate_size"
    EXPERTS = "num_local_experts"
    VOCABULARY = "vocab_size"
    TOKEN = "token"  # an id, to the base of 256


class Parallel(StrEnum):
    """Which side of a linear is cut where several processes share it."""

    COLUMN = "column"  # its outputs
    ROW = "row"  # its inputs
    WHOLE = "whole"  # neither


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear that every decoder layer has, or what the model has once: head and embeddings.

    module: its path in the layer, or in the model. outputs: several where it stores several
    linears on top of one another. group: neighbouring linears of one group read one input, and are
    one fused product. of_experts: whether it is one for each of the model's experts, each with an
    adapter of its own.
    """

    module: str
    inputs: Width
    outputs: tuple[Width, ...]
    group: str
    parallel: Parallel
    of_experts: bool = False

    @property
    def gathers(self) -> bool:
        """Whether its input is a token's id, so that images hold A by columns: [d_in, rank]."""
        return self.inputs is Width.VOCABULARY

    @property
    def name(self) -> str:
        """The last part of the path, which people know the linear by."""
        return self.module.rpartition(".")[2]

    def path(self, layer: int) -> str:
        """The whole name of a layer's linear, as in a checkpoint and in PEFT's files."""
        return f"model.layers.{layer}.{self.module}"


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The RMS norms of a decoder layer, by their names in it; None where there is none.

    Of what attention and the MLP read, and of what they add to the hidden states.
    """

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


class QkNormKind(StrEnum):
    """What is normed before queries and keys turn."""

    NONE = "none"
    HEAD = "head"  # each head's query and key
    WHOLE = "whole"  # a token's queries together, and its keys


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The keys of config.json that size a mixture of experts, which a family's MLPs are.

    counts: of how many experts a layer has; the first that a file has counts. width: of each
    expert's intermediate vector. normalised: whether the weights of a token's experts add up to 1
    whatever norm_topk_prob says.
    """

    counts: tuple[str, ...]
    width: str
    normalised: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models. linears: of each decoder layer, in the table's order.

    switches: the keys of config.json that only some families read, each with what it means where
    the file leaves it out, as in transformers' class of the family; so also for common keys whose
    default is not the usual one. qkv_bias: whether q, k and v have biases, whatever attention_bias
    says. o_bias: the switch that gives o one; None: none does. interleaved_rope: whether neighbours
    turn as a pair, and not x[i] with x[i + half]. experts: None where MLPs are dense.
    norms_plus_one: whether a norm multiplies by 1 + its weight. scaled_embeddings: whether
    embeddings are multiplied by √hidden_size.
    """

    name: str
    linears: tuple[Linear, ...]
    switches: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    o_bias: str | None = "attention_bias"
    norms: LayerNorms = LayerNorms()
    qk_norm: QkNormKind = QkNormKind.NONE
    interleaved_rope: bool = False
    experts: ExpertKeys | None = None
    norms_plus_one: bool = False
    scaled_embeddings: bool = False


_Q = Linear("self_attn.q_proj", Width.HIDDEN, (Width.QUERIES,), "qkv", Parallel.COLUMN)
_K = Linear("self_attn.k_proj", Width.HIDDEN, (Width.KEYS,), "qkv", Parallel.COLUMN)
_V = Linear("self_attn.v_proj", Width.HIDDEN, (Width.KEYS,), "qkv", Parallel.COLUMN)
_QKV = Linear(
    "self_attn.qkv_proj",
    Width.HIDDEN,
    (Width.QUERIES, Width.KEYS, Width.KEYS),
    "qkv",
    Parallel.COLUMN,
)
_O = Linear("self_attn.o_proj", Width.QUERIES, (Width.HIDDEN,), "o", Parallel.ROW)
_GATE = Linear("mlp.gate_proj", Width.HIDDEN, (Width.INTERMEDIATE,), "gate_up", Parallel.COLUMN)
_UP = Linear("mlp.up_proj", Width.HIDDEN, (Width.INTERMEDIATE,), "gate_up", Parallel.COLUMN)
_GATE_UP = Linear(
    "mlp.gate_up_proj",
    Width.HIDDEN,
    (Width.INTERMEDIATE, Width.INTERMEDIATE),
    "gate_up",
    Parallel.COLUMN,
)
_DOWN = Linear("mlp.down_proj", Width.INTERMEDIATE, (Width.HIDDEN,), "down", Parallel.ROW)

_ROUTER = Linear("mlp.gate", Width.HIDDEN, (Width.EXPERTS,), "router", Parallel.WHOLE)
_EXPERT_GATE, _EXPERT_UP = (
    Linear(
        f"mlp.experts.{name}",
        Width.HIDDEN,
        (Width.INTERMEDIATE,),
        "expert_gate_up",
        Parallel.COLUMN,
        of_experts=True,
    )
    for name in ("gate_proj", "up_proj")
)
_EXPERT_DOWN = Linear(
    "mlp.experts.down_proj",
    Width.INTERMEDIATE,
    (Width.HIDDEN,),
    "expert_down",
    Parallel.ROW,
    of_experts=True,
)

_SEPARATE = (_Q, _K, _V, _O, _GATE, _UP, _DOWN)
_FUSED = (_QKV, _O, _GATE_UP, _DOWN)
_ROUTED = (_Q, _K, _V, _O, _ROUTER, _EXPERT_GATE, _EXPERT_UP, _EXPERT_DOWN)
_BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN_WINDOW = {
    "layer_types": None,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
_GEMMA = {
    "attention_bias": False,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": None,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA_NORMS = LayerNorms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_OLMO_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")

# By config.json's model_type.
FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama", _SEPARATE, _BIASES),
    "mistral": Family("Mistral", _SEPARATE, {"sliding_window": 4096}),
    "ministral": Family("Ministral", _SEPARATE, {"layer_types": None, "sliding_window": 4096}),
    "qwen2": Family("Qwen 2.5", _SEPARATE, _QWEN_WINDOW, qkv_bias=True),
    "qwen3": Family(
        "Qwen 3", _SEPARATE, {**_QWEN_WINDOW, "attention_bias": False}, qk_norm=QkNormKind.HEAD
    ),
    "phi3": Family(
        "Phi 3 and 4",
        _FUSED,
        {
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
    ),
    "granite": Family(
        "Granite 3",
        _SEPARATE,
        {
            **_BIASES,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
        },
    ),
    "smollm3": Family(
        "SmolLM 3",
        _SEPARATE,
        {
            **_BIASES,
            "layer_types": None,
            "no_rope_layer_interval": 4,
            "no_rope_layers": None,
            "rope_theta": 2_000_000.0,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
    ),
    "olmo2": Family(
        "OLMo 2",
        _SEPARATE,
        {"attention_bias": False, "rms_norm_eps": 1e-5},
        norms=_OLMO_NORMS,
        qk_norm=QkNormKind.WHOLE,
    ),
    "olmo3": Family(
        "OLMo 3",
        _SEPARATE,
        {
            "attention_bias": False,
            "layer_types": None,
            "rms_norm_eps": 1e-5,
            "rope_local_base_freq": 500_000.0,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        norms=_OLMO_NORMS,
        qk_norm=QkNormKind.WHOLE,
    ),
    "gemma2": Family(
        "Gemma 2",
        _SEPARATE,
        {
            **_GEMMA,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
            "use_bidirectional_attention": None,
        },
        norms=_GEMMA_NORMS,
        norms_plus_one=True,
        scaled_embeddings=True,
    ),
    "gemma3_text": Family(
        "Gemma 3",
        _SEPARATE,
        {
            **_GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131_072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
            "use_bidirectional_attention": False,
            "vocab_size": 262_208,
        },
        norms=_GEMMA_NORMS,
        qk_norm=QkNormKind.HEAD,
        norms_plus_one=True,
        scaled_embeddings=True,
    ),
    "glm4": Family(
        "GLM 4",
        (_Q, _K, _V, _O, _GATE_UP, _DOWN),
        {"attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7},
        o_bias=None,
        norms=LayerNorms(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        interleaved_rope=True,
    ),
    "seed_oss": Family(
        "Seed-OSS",
        _SEPARATE,
        {**_BIASES, "attention_bias": True, "attention_out_bias": False},
        o_bias="attention_out_bias",
    ),
    "qwen3_moe": Family(
        "Qwen 3 MoE",
        _ROUTED,
        {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        qk_norm=QkNormKind.HEAD,
        experts=ExpertKeys(("num_local_experts", "num_experts"), "moe_intermediate_size"),
    ),
    "mixtral": Family(
        "Mixtral",
        _ROUTED,
        {
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
        },
        experts=ExpertKeys(("num_local_experts",), "intermediate_size", normalised=True),
    ),
}


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
    *("internvl", "llava", "llava_next", "mistral3"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_vl"),
)

# What comes after the layers. Where embeddings are tied, it reads their matrix; an adapter of it
# changes the logits alone.
HEAD = Linear("lm_head", Width.HIDDEN, (Width.VOCABULARY,), "lm_head", Parallel.COLUMN)
# What comes before the layers, as a linear of tokens as unit vectors: each reads one column of A.
EMBEDDINGS = Linear(
    "model.embed_tokens", Width.VOCABULARY, (Width.HIDDEN,), "embed_tokens", Parallel.WHOLE
)
OUTER_MODULES = (HEAD.name, EMBEDDINGS.name)
# Rows of these two that an adapter has in place of the base model's: as if of a linear that has for
# each of its tokens, the rank, the row as A's and the id's digits as B's.
HEAD_ROWS, EMBEDDING_ROWS = (
    Linear(name, Width.HIDDEN, (Width.TOKEN,), name, Parallel.WHOLE)
    for name in ("lm_head_rows", "embed_tokens_rows")
)
