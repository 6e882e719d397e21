"""Table of the families of base models: adaptable linears, and all other differences.

A new family of decoders needs an entry in FAMILIES. All else follows from its linears, and
models/config.py reads its switches.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lorikeet_engine.adapter_format.families.family import (
    LAYER_INPUTS,
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

_DELTA, _FULL = LayerKind.DELTA_NET, LayerKind.ATTENTION
_GATED_Q = Linear(
    "self_attn.q_proj", Width.HIDDEN, (Width.GATED_QUERIES,), "qkv", Parallel.COLUMN, kinds=(_FULL,)
)
_DELTA_IN = tuple(
    Linear(
        f"linear_attn.in_proj_{name}",
        Width.HIDDEN,
        outputs,
        "delta_in",
        Parallel.COLUMN,
        kinds=(_DELTA,),
    )
    for name, outputs in (
        ("qkv", (Width.DELTA_KEYS, Width.DELTA_KEYS, Width.DELTA_VALUES)),
        ("z", (Width.DELTA_VALUES,)),
        ("b", (Width.DELTA_GATES,)),
        ("a", (Width.DELTA_GATES,)),
    )
)
_DELTA_OUT = Linear(
    "linear_attn.out_proj",
    Width.DELTA_VALUES,
    (Width.HIDDEN,),
    "delta_out",
    Parallel.ROW,
    kinds=(_DELTA,),
)

_FUSED_DELTA_IN = tuple(
    replace(_DELTA_IN[0], module=f"linear_attn.in_proj_{name}", outputs=(width,))
    for name, width in (("qkvz", Width.DELTA_QKVZ), ("ba", Width.DELTA_BA))
)
_WINDOW = LayerKind.WINDOW
_WINDOW_LINEARS = tuple(replace(linear, kinds=(_WINDOW,)) for linear in (_Q, _K, _V, _O))
_FULL_Q, _FULL_K = (
    replace(linear, outputs=(width,), group="full_qkv", kinds=(_FULL,))
    for linear, width in ((_Q, Width.FULL_QUERIES), (_K, Width.FULL_KEYS))
)
_FULL_O = replace(_O, inputs=Width.FULL_QUERIES, group="full_o", kinds=(_FULL,))
_SHARED_GATE, _SHARED_UP = (
    Linear(
        f"mlp.shared_expert.{name}",
        Width.HIDDEN,
        (Width.SHARED_INTERMEDIATE,),
        "shared_gate_up",
        Parallel.COLUMN,
    )
    for name in ("gate_proj", "up_proj")
)
_SHARED_DOWN = Linear(
    "mlp.shared_expert.down_proj",
    Width.SHARED_INTERMEDIATE,
    (Width.HIDDEN,),
    "shared_down",
    Parallel.ROW,
)
_SHARED_WEIGHT = Linear(
    "mlp.shared_expert_gate", Width.HIDDEN, (Width.ONE,), "shared_weight", Parallel.WHOLE
)

_SEPARATE = (_Q, _K, _V, _O, _GATE, _UP, _DOWN)
_GATED = (_GATED_Q, *(replace(linear, kinds=(_FULL,)) for linear in (_K, _V, _O)))
_SHARING = (
    *(_ROUTER, _EXPERT_GATE, _EXPERT_UP, _EXPERT_DOWN),
    *(_SHARED_GATE, _SHARED_UP, _SHARED_DOWN, _SHARED_WEIGHT),
)
_HYBRID = (*_GATED, *_DELTA_IN, _DELTA_OUT, _GATE, _UP, _DOWN)
_ROUTED_HYBRID = (*_GATED, *_DELTA_IN, _DELTA_OUT, *_SHARING)
_FUSED_HYBRID = (*_GATED, *_FUSED_DELTA_IN, _DELTA_OUT, *_SHARING)
_MAMBA = tuple(
    replace(linear, kinds=(LayerKind.MAMBA,))
    for linear in (
        Linear(
            "mixer.in_proj",
            Width.HIDDEN,
            (*[Width.DELTA_VALUES] * 2, *[Width.DELTA_KEYS] * 2, Width.DELTA_GATES),
            "mamba_in",
            Parallel.COLUMN,
        ),
        Linear("mixer.out_proj", Width.DELTA_VALUES, (Width.HIDDEN,), "mamba_out", Parallel.ROW),
    )
)
_LATENT = LayerKind.LATENT_EXPERTS


def _mixer(linear: Linear, name: str, *kinds: LayerKind, **changes: Any) -> Linear:
    """Return a linear of a layer that consists of one part, the mixer.

    linear: the linear of other families. name: the linear's path in the mixer.
    kinds: kinds of layers that have the linear. changes: other differences to `linear`.
    """
    return replace(linear, module=f"mixer.{name}", kinds=kinds, **changes)


_GRANITE_HYBRID = (
    *(replace(linear, kinds=(_FULL,)) for linear in (_Q, _K, _V, _O)),
    *(replace(each, module=each.module.replace("mixer.", "mamba.")) for each in _MAMBA),
    replace(_ROUTER, module="mlp.router"),
    *(_EXPERT_GATE, _EXPERT_UP, _EXPERT_DOWN),
    replace(
        _SHARED_UP,
        module="shared_mlp.input_linear",
        outputs=(Width.SHARED_INTERMEDIATE, Width.SHARED_INTERMEDIATE),
    ),
    replace(_SHARED_DOWN, module="shared_mlp.output_linear"),
)
_MIXTURE = LayerKind.EXPERTS, _LATENT
_ALONE = (
    *(_mixer(each, each.name, _FULL) for each in (_Q, _K, _V, _O)),
    *_MAMBA,
    _mixer(_UP, "up_proj", LayerKind.MLP, group="up", outputs=(Width.DENSE_INTERMEDIATE,)),
    _mixer(_DOWN, "down_proj", LayerKind.MLP, inputs=Width.DENSE_INTERMEDIATE),
    _mixer(_ROUTER, "gate", *_MIXTURE),
    _mixer(_EXPERT_UP, "experts.up_proj", *_MIXTURE, group="expert_up", inputs=Width.LATENT),
    _mixer(_EXPERT_DOWN, "experts.down_proj", *_MIXTURE, outputs=(Width.LATENT,)),
    _mixer(_ROUTER, "fc1_latent_proj", _LATENT, group="latent_in", outputs=(Width.LATENT,)),
    _mixer(_SHARED_UP, "shared_experts.up_proj", *_MIXTURE, group="shared_up"),
    _mixer(_SHARED_DOWN, "shared_experts.down_proj", *_MIXTURE),
    Linear(
        "mixer.fc2_latent_proj",
        Width.LATENT,
        (Width.HIDDEN,),
        "latent_out",
        Parallel.WHOLE,
        kinds=(_LATENT,),
    ),
)
_DENSE, _SPARSE = LayerKind.DENSE, LayerKind.SPARSE
_LATENT_ATTENTION = (
    Linear(
        "self_attn.q_a_proj",
        Width.HIDDEN,
        (Width.QUERY_LATENT,),
        "latents",
        Parallel.WHOLE,
    ),
    Linear(
        "self_attn.kv_a_proj_with_mqa",
        Width.HIDDEN,
        (Width.LATENT_AND_KEY,),
        "latents",
        Parallel.WHOLE,
    ),
    Linear("self_attn.q_b_proj", Width.QUERY_LATENT, (Width.QUERIES,), "q_b", Parallel.COLUMN),
    Linear(
        "self_attn.kv_b_proj",
        Width.KV_LATENT,
        (Width.LATENT_KEYS_VALUES,),
        "kv_b",
        Parallel.COLUMN,
    ),
    replace(_O, inputs=Width.LATENT_VALUES),
    *(
        replace(linear, outputs=(Width.DENSE_INTERMEDIATE,), kinds=(_DENSE,))
        for linear in (_GATE, _UP)
    ),
    replace(_DOWN, inputs=Width.DENSE_INTERMEDIATE, kinds=(_DENSE,)),
    *(
        replace(
            linear,
            module=linear.module.replace("shared_expert.", "shared_experts."),
            kinds=(_SPARSE,),
        )
        for linear in _SHARING[:-1]
    ),
)
_WHOLE_QUERIES = (
    replace(_Q, group="queries"),
    *(each for each in _LATENT_ATTENTION if "q_" not in each.module),
)
_FUSED = (_QKV, _O, _GATE_UP, _DOWN)
_ROUTED = (_Q, _K, _V, _O, _ROUTER, _EXPERT_GATE, _EXPERT_UP, _EXPERT_DOWN)
_BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN_WINDOW = {
    "layer_types": None,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
_QWEN_KEYS = RecurrentKeys(
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# Names of transformers 5, and those of configs from before.
_MAMBA_KINDS = {
    "attention": _FULL,
    "full_attention": _FULL,
    "linear_attention": LayerKind.MAMBA,
    "mamba": LayerKind.MAMBA,
}
_QWEN_HYBRID = {
    "attention_bias": False,
    "full_attention_interval": 4,
    "head_dim": 256,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
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
_GEMMA4_UNIFIED = {
    "attention_bias": False,
    "attention_k_eq_v": False,
    "final_logit_softcapping": None,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": None,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 0,
    "per_layer_config": None,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}
_GEMMA4_ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_GEMMA4 = _GEMMA4_UNIFIED | {
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
}
_GEMMA4_LINEARS = (*_WINDOW_LINEARS, _FULL_Q, _FULL_K, _FULL_O, _GATE, _UP, _DOWN)
_GEMMA4_MOE_LINEARS = (
    *_GEMMA4_LINEARS[:-3],
    *(
        replace(linear, outputs=(Width.SHARED_INTERMEDIATE,), group="shared_gate_up")
        for linear in (_GATE, _UP)
    ),
    replace(_DOWN, inputs=Width.SHARED_INTERMEDIATE, group="shared_down"),
    replace(_ROUTER, module="router.proj"),
    *(
        replace(linear, module=linear.module.removeprefix("mlp."))
        for linear in (_EXPERT_GATE, _EXPERT_UP, _EXPERT_DOWN)
    ),
)
_OWNERS = (_WINDOW, _FULL)
_READERS = tuple(kind.reader for kind in _OWNERS)
_EVERY_WINDOW, _EVERY_FULL = ((kind, kind.reader) for kind in _OWNERS)
_GEMMA4_E_LINEARS = (
    replace(_Q, kinds=_EVERY_WINDOW),
    *(replace(linear, kinds=(_WINDOW,)) for linear in (_K, _V)),
    replace(_O, kinds=_EVERY_WINDOW),
    replace(_FULL_Q, kinds=_EVERY_FULL),
    _FULL_K,
    replace(_V, outputs=(Width.FULL_KEYS,), group="full_qkv", kinds=(_FULL,)),
    replace(_FULL_O, kinds=_EVERY_FULL),
    *(replace(linear, kinds=_OWNERS) for linear in (_GATE, _UP, _DOWN)),
    *(
        replace(linear, outputs=(Width.WIDE_INTERMEDIATE,), group="wide_gate_up", kinds=_READERS)
        for linear in (_GATE, _UP)
    ),
    replace(_DOWN, inputs=Width.WIDE_INTERMEDIATE, group="wide_down", kinds=_READERS),
    Linear(
        "per_layer_input_gate",
        Width.HIDDEN,
        (Width.LAYER_INPUT,),
        "layer_input_gate",
        Parallel.WHOLE,
    ),
    Linear(
        "per_layer_projection",
        Width.LAYER_INPUT,
        (Width.HIDDEN,),
        "layer_input_out",
        Parallel.WHOLE,
    ),
)
_LIKE_GEMMA4: Mapping[str, Any] = {
    "norms": _GEMMA_NORMS,
    "qk_norm": QkNormKind.HEAD,
    "scaled_embeddings": True,
    "scales_in_module": True,
    "rope_parameters": _GEMMA4_ROPE,
    "attention_scale": 1.0,
    "value_norm": True,
    "layer_scalars": True,
}
_GLM = {"attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}
_GLM_LINEARS = (_Q, _K, _V, _O, _GATE_UP, _DOWN)
_OLMO_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_DEEPSEEK_EXPERTS = ExpertKeys(
    ("n_routed_experts",),
    "moe_intermediate_size",
    parameters=True,
    shared=True,
    weighed=False,
    shared_count="n_shared_experts",
)
_LIKE_DEEPSEEK: Mapping[str, Any] = {
    "o_bias": None,
    "experts": replace(_DEEPSEEK_EXPERTS, sigmoid=True),
    "kinds_key": "mlp_layer_types",
    "fixed": {
        "attention_bias": False,
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}

_DEEPSEEK_V3 = {
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "mlp_layer_types": None,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
}

VARIANTS: Mapping[str, Mapping[tuple[str, bool], str]] = {
    "gemma4_text": {
        ("enable_moe_block", True): "gemma4_moe_text",
        ("hidden_size_per_layer_input", True): "gemma4_e_text",
    },
    "deepseek_v3": {("q_lora_rank", False): "deepseek_v3_whole_queries"},
}
"""Model types that switches divide: by model_type, and by a switch's key in config.json with
whether it has a value (false, 0 and null are none), the family of such models. No model may be of
two of these families; one that is of none is of the family that is called as the model_type."""
# By config.json's model_type.
FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama", _SEPARATE, _BIASES),
    "mistral": Family("Mistral", _SEPARATE, {"sliding_window": 4096}),
    "ministral": Family("Ministral", _SEPARATE, {"layer_types": None, "sliding_window": 4096}),
    "ministral3": Family(
        "Ministral 3",
        _SEPARATE,
        {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None},
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
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
    "exaone4": Family(
        "EXAONE 4",
        _SEPARATE,
        {
            "layer_types": None,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        norms=_OLMO_NORMS,
        qk_norm=QkNormKind.HEAD,
        rope_in_windows=True,
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
            "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
            "use_bidirectional_attention": False,
        },
        norms=_GEMMA_NORMS,
        qk_norm=QkNormKind.HEAD,
        norms_plus_one=True,
        scaled_embeddings=True,
        scales_in_module=True,
    ),
    "gemma4_text": Family("Gemma 4", _GEMMA4_LINEARS, _GEMMA4, **_LIKE_GEMMA4),
    "gemma4_moe_text": Family(
        "Gemma 4 MoE",
        _GEMMA4_MOE_LINEARS,
        _GEMMA4 | {"moe_intermediate_size": None, "num_experts": None, "top_k_experts": None},
        experts=ExpertKeys(
            ("num_experts",),
            "moe_intermediate_size",
            normalised=True,
            parameters=True,
            shared=True,
            weighed=False,
            shared_width="intermediate_size",
            per_token="top_k_experts",
            beside=True,
        ),
        **_LIKE_GEMMA4,
    ),
    "gemma4_e_text": Family(
        "Gemma 4 E",
        _GEMMA4_E_LINEARS,
        _GEMMA4 | {"vocab_size_per_layer_input": 262_144},
        kind_names={kind.value: kind for kind in _OWNERS},
        outer=(LAYER_INPUTS,),
        **_LIKE_GEMMA4,
    ),
    "gemma4_unified_text": Family("Gemma 4 12B", _GEMMA4_LINEARS, _GEMMA4_UNIFIED, **_LIKE_GEMMA4),
    "glm": Family("GLM 4 9B Chat", _GLM_LINEARS, _GLM, o_bias=None, interleaved_rope=True),
    "glm4": Family(
        "GLM 4",
        _GLM_LINEARS,
        _GLM,
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
        experts=ExpertKeys(
            ("num_local_experts",), "intermediate_size", normalised=True, old_linears=True
        ),
    ),
    "qwen3_5_text": Family(
        "Qwen 3.5",
        _HYBRID,
        _QWEN_HYBRID,
        qk_norm=QkNormKind.HEAD,
        norms_plus_one=True,
        recurrent=_QWEN_KEYS,
        mtp=True,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen 3.5 MoE",
        _ROUTED_HYBRID,
        {
            **_QWEN_HYBRID,
            "moe_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 512,
        },
        qk_norm=QkNormKind.HEAD,
        norms_plus_one=True,
        experts=ExpertKeys(
            ("num_experts",),
            "moe_intermediate_size",
            normalised=True,
            parameters=True,
            shared=True,
        ),
        recurrent=_QWEN_KEYS,
        mtp=True,
    ),
    "qwen3_next": Family(
        "Qwen3-Next",
        _FUSED_HYBRID,
        {
            **_QWEN_HYBRID,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "shared_expert_intermediate_size": 512,
        },
        qk_norm=QkNormKind.HEAD,
        norms_plus_one=True,
        experts=ExpertKeys(("num_experts",), "moe_intermediate_size", shared=True),
        recurrent=_QWEN_KEYS,
        mtp=True,
    ),
    "granitemoehybrid": Family(
        "Granite 4",
        _GRANITE_HYBRID,
        {
            "attention_bias": False,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "layer_types": None,
            "logits_scaling": 1.0,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_d_head": "auto",
            "mamba_d_state": 256,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 128,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "position_embedding_type": None,
            "residual_multiplier": 1.0,
            "shared_intermediate_size": 1024,
            "time_step_limit": (0.0, math.inf),
        },
        experts=ExpertKeys(
            ("num_local_experts",),
            "intermediate_size",
            normalised=True,
            parameters=True,
            shared=True,
            weighed=False,
            may_lack=True,
            shared_width="shared_intermediate_size",
        ),
        kind_names=_MAMBA_KINDS,
        recurrent=RecurrentKeys(
            "mamba_n_groups",
            "mamba_d_state",
            "mamba_n_heads",
            "mamba_d_head",
            "mamba_d_conv",
            "mamba_conv_bias",
            "time_step_limit",
            "mamba_expand",
        ),
        fixed={"mamba_proj_bias": False},
    ),
    "nemotron_h": Family(
        "Nemotron 3",
        _ALONE,
        {
            "conv_kernel": 4,
            "head_dim": 128,
            "hybrid_override_pattern": None,
            "intermediate_size": 21504,
            "layer_norm_epsilon": 1e-5,
            "layers_block_type": None,
            "mamba_head_dim": 64,
            "mamba_num_heads": 128,
            "moe_intermediate_size": 7688,
            "moe_latent_size": None,
            "moe_shared_expert_intermediate_size": 7688,
            "n_groups": 8,
            "n_routed_experts": 8,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.0,
            "ssm_state_size": 128,
            "time_step_limit": (0.0, math.inf),
            "use_conv_bias": True,
        },
        o_bias=None,
        norms=LayerNorms(attention_input="norm", mlp_input="norm"),
        experts=ExpertKeys(
            ("n_routed_experts",),
            "moe_intermediate_size",
            parameters=True,
            shared=True,
            weighed=False,
            sigmoid=True,
            shared_width="moe_shared_expert_intermediate_size",
        ),
        kinds_key="layers_block_type",
        kind_names={**_MAMBA_KINDS, "mlp": LayerKind.MLP, "moe": LayerKind.EXPERTS},
        alone=True,
        embeddings="embeddings",
        recurrent=RecurrentKeys(
            "n_groups",
            "ssm_state_size",
            "mamba_num_heads",
            "mamba_head_dim",
            "conv_kernel",
            "use_conv_bias",
            "time_step_limit",
        ),
        fixed={
            "attention_bias": False,
            "mamba_hidden_act": "silu",
            "mamba_proj_bias": False,
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "n_group": 1,
            "n_shared_experts": 1,
            "residual_in_fp32": False,
            "sliding_window": None,
            "topk_group": 1,
            "use_bias": False,
        },
    ),
    "glm4_moe_lite": Family(
        "GLM 4.7 Flash",
        _LATENT_ATTENTION,
        {
            "first_k_dense_replace": None,
            "intermediate_size": 10240,
            "kv_lora_rank": 512,
            "mlp_layer_types": None,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_interleave": True,
            "routed_scaling_factor": 1.8,
            "topk_group": 1,
            "v_head_dim": 256,
        },
        **_LIKE_DEEPSEEK,
    ),
    "deepseek_v3": Family("DeepSeek V3", _LATENT_ATTENTION, _DEEPSEEK_V3, **_LIKE_DEEPSEEK),
    "deepseek_v3_whole_queries": Family(
        "DeepSeek V3 with whole queries", _WHOLE_QUERIES, _DEEPSEEK_V3, **_LIKE_DEEPSEEK
    ),
    "deepseek_v2": Family(
        "DeepSeek V2 Lite",
        _WHOLE_QUERIES,
        {
            "first_k_dense_replace": 0,
            "intermediate_size": 11008,
            "kv_lora_rank": 512,
            "mlp_layer_types": None,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": None,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        o_bias=None,
        experts=_DEEPSEEK_EXPERTS,
        interleaved_rope=True,
        kinds_key="mlp_layer_types",
        fixed={
            "attention_bias": False,
            "hidden_act": "silu",
            "mlp_bias": False,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "topk_method": "greedy",
        },
    ),
    "gpt_oss": Family(
        "gpt-oss",
        (
            _Q,
            _K,
            _V,
            _O,
            replace(_ROUTER, module="mlp.router"),
            _EXPERT_GATE,
            _EXPERT_UP,
            _EXPERT_DOWN,
        ),
        {
            "attention_bias": True,
            "head_dim": 64,
            "layer_types": None,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        experts=ExpertKeys(
            ("num_local_experts", "num_experts"),
            "intermediate_size",
            normalised=True,
            parameters=True,
            clamped=True,
        ),
        sinks=True,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
}
