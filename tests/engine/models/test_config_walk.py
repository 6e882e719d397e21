"""Every key of a family's config in transformers is read, refused by name, or known as idle."""

import json
from dataclasses import MISSING, fields
from functools import cache

import pytest
import transformers

from lorikeet_engine.adapter_format import FAMILIES
from lorikeet_engine.adapter_format.families import VARIANTS
from lorikeet_engine.errors import ModelError
from lorikeet_engine.models.config import ModelConfig
from tests.engine.conftest import SIZES

# What changes no answer: training's, and what transformers does with memory and padding.
IDLE = {
    "attention_dropout",
    "bos_token_id",
    "embd_pdrop",
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "residual_dropout",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "use_cache",
}
# Where every layer has experts, none is as wide as dense ones would be.
IDLE_IN = {
    ("qwen3_moe", "intermediate_size"),
    ("qwen3_next", "intermediate_size"),
    # Of Gemma 4's mixtures, and of E2B and E4B.
    *(
        (family, key)
        for family in ("gemma4_text", "gemma4_e_text")
        for key in ("moe_intermediate_size", "num_experts", "top_k_experts")
    ),
    *(("gemma4_text", key) for key in ("use_double_wide_mlp", "vocab_size_per_layer_input")),
    *(("gemma4_moe_text", key) for key in ("use_double_wide_mlp", "vocab_size_per_layer_input")),
    ("gemma4_unified_text", "use_double_wide_mlp"),
    ("gpt_oss", "max_position_embeddings"),  # YaRN's factor gives a longer context
    # Of kernels, of the first weights, of tokens predicted at once; and what transformers reads in
    # prompts alone, to none's use: no trainer and no other engine has such a least time step.
    ("granitemoehybrid", "mamba_chunk_size"),
    ("nemotron_h", "chunk_size"),
    ("nemotron_h", "expand"),
    ("nemotron_h", "hidden_dropout"),
    ("nemotron_h", "mamba_ssm_cache_dtype"),
    ("nemotron_h", "moe_shared_expert_overlap"),
    ("nemotron_h", "mtp_layers_block_type"),
    ("nemotron_h", "num_logits_to_keep"),
    ("nemotron_h", "num_nextn_predict_layers"),
    ("nemotron_h", "rescale_prenorm_residual"),
    ("nemotron_h", "time_step_floor"),
    ("nemotron_h", "time_step_max"),
    ("nemotron_h", "time_step_min"),
    ("nemotron_h", "use_mamba_kernels"),
}
WHOLE_QUERIES = "deepseek_v3_whole_queries"
# Tokens predicted at once.
IDLE_IN |= {(family, "num_mtp_layers") for family in ("deepseek_v3", WHOLE_QUERIES)}
# Groups of experts, of topk_method group_limited_greedy alone, and a key that nothing reads.
IDLE_IN |= {("deepseek_v2", key) for key in ("n_group", "topk_group", "head_dim")}
# Where all of a family's keys at their defaults make a model that is refused.
GEMMA4_TEXT = {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "top_k_experts": 2,
}
BESIDE = {
    "gemma4_text": GEMMA4_TEXT,
    "gemma4_moe_text": GEMMA4_TEXT | {"enable_moe_block": True},
    "gemma4_e_text": GEMMA4_TEXT | {"attention_k_eq_v": False, "hidden_size_per_layer_input": 12},
    "gemma4_unified_text": {"attention_k_eq_v": True},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    WHOLE_QUERIES: {"num_key_value_heads": 4, "q_lora_rank": None},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
    },
}
# Hybrids' layers, other than the default, and keys that transformers reads and does not keep.
HYBRID_LAYERS = ["linear_attention", "full_attention"] * 2
ALONE = ["linear_attention", "moe", "full_attention", "mlp"]
LAYERS = {
    "granitemoehybrid": {"layer_types": HYBRID_LAYERS[::-1]},
    "nemotron_h": {"layers_block_type": ALONE},
}
GLOBAL = {"global_head_dim": 512, "num_global_key_value_heads": None, "per_layer_config": None}
GEMMA4 = {
    "hidden_size_per_layer_input": 8,
    "layer_types": ["full_attention"] * 4,
    "num_kv_shared_layers": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 7.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
    },
    "sliding_window": 32,
    "use_bidirectional_attention": "all",
}
HYBRIDS = {"full_attention_interval": 4, "partial_rotary_factor": 0.25}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
WINDOW_IN_ALL = {"max_window_layers": 0, "no_rope_layers": [0, 0], "layer_types": None}
# What else has to be set for a key to mean something.
WITH = {
    "layer_types": {
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": ["full_attention"] * 2,
    },
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 64, "layer_types": None},
    "original_max_position_embeddings": {"rope_parameters": LONGROPE},
    "no_rope_layer_interval": {"no_rope_layers": None},
    "rope_parameters": {"layer_types": ["full_attention"] * 2},
    "sliding_window": {"use_sliding_window": True, **WINDOW_IN_ALL},
    "sliding_window_pattern": {"layer_types": None, "sliding_window": 64},
    "use_sliding_window": {"sliding_window": 64, **WINDOW_IN_ALL},
}
OTHERWISE = {
    "attn_logit_softcapping": 7.0,
    "final_logit_softcapping": 7.0,
    "head_dim": 32,
    "hidden_activation": "silu",
    "hidden_act": "gelu",
    "hidden_size": 128,
    "layer_types": ["full_attention", "sliding_attention"],
    "layers_block_type": ALONE[::-1],
    "max_position_embeddings": 2**19,  # beyond the context of any family's own YaRN
    "max_window_layers": 0,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "mlp_only_layers": [1],
    "moe_latent_size": 32,
    "no_rope_layer_interval": 2,
    "no_rope_layers": [0, 1],
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "original_max_position_embeddings": 16,
    "position_embedding_type": "nope",
    "q_lora_rank": 40,
    "rope_parameters": {"rope_type": "linear", "factor": 3.0},
    "sliding_window": 32,
    "sliding_window_pattern": 2,
    "use_bidirectional_attention": True,
}


@cache
def config_class(family):
    return type(transformers.AutoConfig.for_model(model_type(family)))


def model_type(family):
    """The model_type of a family's config.json, which a switch may assign to another family."""
    of = {variant: name for name, variants in VARIANTS.items() for variant in variants.values()}
    return of.get(family, family)


@cache
def keys_of(family):
    """Keys of the family's config class alone, with their defaults."""
    every = {field.name for field in fields(transformers.PreTrainedConfig)}
    return {
        field.name: None if field.default is MISSING else field.default
        for field in fields(config_class(family))
        if field.name not in every
    }


@pytest.fixture
def parse(tmp_path):
    def parse(raw):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return ModelConfig.from_folder(tmp_path)

    return parse


def outcome(parse, raw):
    """(the config, no refusal) or (None, what the refusal says)."""
    try:
        return parse(raw), ""
    except ModelError as error:
        return None, str(error)


def otherwise(key, value):
    if key in OTHERWISE:
        return OTHERWISE[key]
    return not value if isinstance(value, bool) else 2 * value


@pytest.mark.parametrize(
    ("family", "key"),
    [(f, k) for f in FAMILIES for k in keys_of(f) if k not in IDLE and (f, k) not in IDLE_IN],
)
def test_another_value_of_a_key_changes_the_model_or_is_refused_by_name(family, key, parse):
    plain = {**keys_of(family), **SIZES, "sliding_window": None}
    plain = {name: value for name, value in plain.items() if name in keys_of(family)}
    plain |= {"model_type": model_type(family)} | ({"head_dim": 16} if "head_dim" in plain else {})
    plain |= BESIDE.get(family, {}) | LAYERS.get(family, {})
    if family.startswith("gemma4"):
        kinds = ["sliding_attention", "full_attention"] * 2
        plain |= {"num_hidden_layers": 4, "sliding_window": 64, "layer_types": kinds}
        beside, changed = {}, GEMMA4.get(key, otherwise(key, plain[key]))
    elif FAMILIES[family].is_hybrid:
        plain |= {"num_hidden_layers": 4}
        beside, changed = {}, HYBRID_LAYERS if key == "layer_types" else otherwise(key, plain[key])
    else:
        beside, changed = WITH.get(key, {}), otherwise(key, plain[key])
    plain |= {k: v for k, v in beside.items() if k in plain}
    other = {**plain, key: changed}
    before, (after, refusal) = parse(plain), outcome(parse, other)
    assert after != before
    assert after is not None or key in refusal


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_left_out_means_what_transformers_says(family, parse):
    known = keys_of(family)
    theta = config_class(family).default_theta
    theta = theta if isinstance(theta, dict) else {"global": theta, "local": theta}
    outside = {
        "partial_rotary_factor": {"glm": 0.5, "glm4": 0.5}.get(family, 1.0),
        **(HYBRIDS if FAMILIES[family].is_hybrid else {}),
        **GLOBAL,
        "rope_local_base_freq": theta["local"],
        "rope_theta": theta["global"],
        "first_k_dense_replace": known.get("first_k_dense_replace"),
        "mlp_layer_types": None,
        "hybrid_override_pattern": None,
        "sliding_window_pattern": known.get("sliding_window_pattern")
        or {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}.get(family),
    }
    for key, value in FAMILIES[family].switches.items():
        assert value == (outside[key] if key in outside else known[key]), key
    sizes = {key: value for key, value in SIZES.items() if key != "tie_word_embeddings"}
    sizes |= {"max_position_embeddings": 8192, "num_hidden_layers": 8, **BESIDE.get(family, {})}
    if family in LAYERS:
        sizes |= {key: 2 * kinds for key, kinds in LAYERS[family].items()}
    config = parse({**sizes, "model_type": model_type(family)})
    assert config.norm_eps == known.get("rms_norm_eps", known.get("layer_norm_epsilon"))
    assert config.tied_embeddings == config.shape.tied == known["tie_word_embeddings"]
    want = transformers.AutoConfig.for_model(model_type(family), **sizes)
    slides = [kind == "sliding_attention" for kind in layer_types(want)]
    assert config.windows == tuple(want.sliding_window if s else None for s in slides)
    if FAMILIES[family].is_hybrid:
        names = FAMILIES[family].kind_names
        assert list(config.shape.kinds) == [names.get(kind, kind) for kind in kinds_of(want)]
    if "sliding_attention" in FAMILIES[family].rope_parameters:
        assert FAMILIES[family].rope_parameters == want.rope_parameters
        kinds = {"global": "full_attention", "local": "sliding_attention"}
        theta = {each: want.rope_parameters[kind]["rope_theta"] for each, kind in kinds.items()}
    elif FAMILIES[family].rope_parameters:
        theta = dict.fromkeys(theta, want.rope_parameters["rope_theta"])
        assert {*FAMILIES[family].rope_parameters.items()} <= {*want.rope_parameters.items()}
    thetas = [theta["local" if s else "global"] for s in slides]
    assert all(r is None or r.theta == t for r, t in zip(config.ropes, thetas, strict=True))


def layer_types(config):
    if getattr(config, "layer_types", None) is not None:
        return config.layer_types
    has_window = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if has_window else "full_attention"] * config.num_hidden_layers


def kinds_of(config):
    if config.model_type in ("deepseek_v2", "deepseek_v3"):
        dense = config.first_k_dense_replace
        return ["dense"] * dense + ["sparse"] * (config.num_hidden_layers - dense)
    return getattr(config, "mlp_layer_types", None) or config.layer_types


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_other_tools_add_are_ignored(family, parse):
    plain = {**SIZES, "num_hidden_layers": 4, "sliding_window": None}
    plain |= {"model_type": model_type(family)}
    plain |= BESIDE.get(family, {}) | LAYERS.get(family, {})
    added = {"unsloth_fixed": True, "lm_head_bias": False, "auto_map": {"a": "b"}, "dtype": "half"}
    assert parse(plain | added) == parse(plain)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size_per_layer_input": 8}, "attention_k_eq_v=True: want false beside hidden_s"),
        ({"hidden_size_per_layer_input": 8.5}, "hidden_size_per_layer_input=8.5: want a number"),
        ({"hidden_size_per_layer_input": -8}, "hidden_size_per_layer_input=-8: want a positive"),
        ({"attention_k_eq_v": False}, "attention_k_eq_v=False: want true"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2: want 0: only Gemma 4 E2B"),
        (
            {"enable_moe_block": True, "hidden_size_per_layer_input": 8},
            "hidden_size_per_layer_input=8: want 0 beside enable_moe_block",
        ),
    ],
)
def test_parts_that_no_published_gemma_4_has_together_are_refused(changes, words, parse):
    raw = {**SIZES, **GEMMA4_TEXT, "num_hidden_layers": 4, "model_type": "gemma4_text"}
    parse(raw)
    with pytest.raises(ModelError, match=words):
        parse(raw | changes)
    del raw["hidden_size_per_layer_input"]  # is 256 then
    with pytest.raises(ModelError, match="attention_k_eq_v=True: want false beside hidden_size"):
        parse(raw)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers=4: want a number from 0 to 3"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1: want a number from 0 to 3"),
        ({"num_kv_shared_layers": 3}, "=3: want fewer: no layer with keys and values is attention"),
        ({"vocab_size_per_layer_input": 255}, "=255: want at least vocab_size .256."),
        ({"use_double_wide_mlp": "yes"}, "use_double_wide_mlp='yes': want true or false"),
    ],
)
def test_gemma_4_e_is_refused_if_layers_lack_what_they_read(changes, words, parse):
    raw = {**SIZES, **BESIDE["gemma4_e_text"], "num_hidden_layers": 4, "model_type": "gemma4_text"}
    raw |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    assert [kind.has_kv for kind in parse(raw | {"num_kv_shared_layers": 1}).shape.kinds] == [
        *[True] * 3,
        False,
    ]
    with pytest.raises(ModelError, match=words):
        parse(raw | changes)


@pytest.mark.parametrize("family", ["nemotron_h", "granitemoehybrid"])
def test_keys_of_rotary_embeddings_are_ignored_where_no_layer_has_one(family, parse):
    plain = {**SIZES, "num_hidden_layers": 4, "model_type": family, **LAYERS[family]}
    turned = {"rope_theta": 7.0, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "other"}}
    assert parse(plain | turned) == parse(plain)
    assert set(parse(plain).ropes) == {None}
