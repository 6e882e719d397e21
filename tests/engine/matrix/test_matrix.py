"""Answers equal transformers' and PEFT's for every family, storage and feature of requests.

A cell of the matrix is one engine: a family (FAMILIES, MOE, GEMMA4_MOE, GEMMA4_E, HYBRID, MAMBA,
LATENT and GPT_OSS of tests/engine/conftest.py) with a storage (STORAGES), in which every feature
of requests (FEATURES) occurs. `make test` tries every family in floats or a storage as exact, and
each storage with the few families of OFTEN; `make soak` tries the others.
"""

import pytest

from lorikeet_engine.adapter_format import BaseShape, read_config
from tests.engine.conftest import (
    FAMILIES,
    GEMMA4_E,
    GEMMA4_MOE,
    GPT_OSS,
    HYBRID,
    LATENT,
    MAMBA,
    MOE,
)
from tests.engine.matrix.reference import SavedFamily, StoredReference
from tests.engine.matrix.storages import EXACT, STORAGES
from tests.engine.matrix.traffic import (
    ACTIVATED,
    ADAPTERS,
    ADDED,
    ALL,
    FEATURES,
    WEIGHTS,
    answers_of,
    assert_equal,
)
from tests.engine.moe_adapters import BOTH

pytestmark = pytest.mark.usefixtures("one_thread", "forked_followers")
MOE_ADAPTERS = ADAPTERS | {
    "all_linears": ADAPTERS["all_linears"] | {"target_parameters": BOTH},
}
# The shared expert's linears instead of a dense MLP's.
SHARED_ADAPTERS = MOE_ADAPTERS | {
    "some_linears": ADAPTERS["some_linears"]
    | {
        "target_modules": ["v_proj", "shared_expert.down_proj", "in_proj_z", "in_proj_ba"],
        "rank_pattern": {r"layers\.1\.mlp\.shared_expert\.down_proj": 12},
    },
    "head": ADAPTERS["head"]
    | {"target_modules": ["q_proj", "shared_expert_gate", "lm_head", "embed_tokens"]},
    "rows": ADAPTERS["rows"] | {"target_modules": ["q_proj", "shared_expert.down_proj"]},
    # PEFT takes gate_proj and its like for parameters of experts, which have no DoRA
    "dora": ADAPTERS["dora"]
    | {"target_modules": [n for n in ALL if n not in ("gate_proj", "up_proj", "down_proj")]},
    "biases": ADAPTERS["biases"]
    | {"target_modules": ["q_proj", "o_proj", "in_proj_ba", "shared_expert_gate"]},
}
# Attention, the router and experts.
GPT_OSS_ADAPTERS = {
    "all_linears": ADAPTERS["all_linears"] | {"target_parameters": ["mlp.router.weight", *BOTH]},
    "some_linears": ADAPTERS["some_linears"]
    | {
        "target_modules": ["v_proj", "o_proj"],
        "target_parameters": BOTH,
        "rank_pattern": {r"layers\.1\.self_attn\.o_proj": 12},
    },
    "head": ADAPTERS["head"] | {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "rows": ADAPTERS["rows"] | {"target_modules": ["q_proj"]},
    "dora": ADAPTERS["dora"],
    "biases": ADAPTERS["biases"],
}
# Experts that are no part of the MLP beside them, and the router.
GEMMA4_ADAPTERS = ADAPTERS | {
    "all_linears": ADAPTERS["all_linears"]
    | {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "head": ADAPTERS["head"] | {"target_modules": ["q_proj", "proj", "lm_head", "embed_tokens"]},
}
# Inputs of each layer beside the usual linears; keys and values in layers that have their own.
GEMMA4_E_ADAPTERS = ADAPTERS | {
    "all_linears": ADAPTERS["all_linears"] | {"target_modules": "all-linear"},
    "some_linears": ADAPTERS["some_linears"]
    | {"target_modules": ["v_proj", "down_proj", "per_layer_projection"]},
    "head": ADAPTERS["head"]
    | {"target_modules": ["per_layer_model_projection", "up_proj", "lm_head", "embed_tokens"]},
    "rows": ADAPTERS["rows"] | {"target_modules": ["q_proj", "per_layer_input_gate"]},
    "dora": ADAPTERS["dora"] | {"lora_alpha": 2, "target_modules": "all-linear"},
    "biases": ADAPTERS["biases"]
    | {"target_modules": ["v_proj", "per_layer_projection", "per_layer_model_projection"]},
}
# Mixers and shared experts. PEFT adapts no out_proj of Mamba.
MAMBA_ADAPTERS = {
    "all_linears": ADAPTERS["all_linears"]
    | {"target_modules": ["in_proj", *(name for name in ALL if name != "out_proj")]},
    "some_linears": ADAPTERS["some_linears"]
    | {
        "target_modules": ["v_proj", "shared_experts.down_proj", "in_proj"],
        "rank_pattern": {r"layers\.[12]\.mixer\.shared_experts\.down_proj": 12},
    },
    "head": ADAPTERS["head"]
    | {
        "target_modules": ["q_proj", "up_proj", "lm_head", "embeddings"],
        "rank_pattern": {"lm_head": 12, "embeddings": 5},
    },
    "rows": ADAPTERS["rows"]
    | {
        "trainable_token_indices": {
            {"embed_tokens": "embeddings"}.get(name, name): ids
            for name, ids in ADAPTERS["rows"]["trainable_token_indices"].items()
        },
    },
    "dora": ADAPTERS["dora"]
    | {"target_modules": ["in_proj", *(name for name in ALL if name != "out_proj")]},
    "biases": ADAPTERS["biases"] | {"target_modules": ["in_proj", "v_proj", "o_proj"]},
}
# Mixers and the MLP that all tokens share.
GRANITE_ADAPTERS = {
    "all_linears": ADAPTERS["all_linears"] | {"target_modules": "all-linear"},
    "some_linears": ADAPTERS["some_linears"]
    | {
        "target_modules": ["v_proj", "output_linear", "in_proj"],
        "rank_pattern": {r"layers\.1\.shared_mlp\.output_linear": 12},
    },
    "head": ADAPTERS["head"] | {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "rows": ADAPTERS["rows"] | {"target_modules": ["q_proj", "output_linear"]},
    "dora": ADAPTERS["dora"]
    | {"target_modules": ["q_proj", "o_proj", "input_linear", "output_linear", "in_proj"]},
    "biases": ADAPTERS["biases"] | {"target_modules": ["v_proj", "input_linear", "in_proj"]},
}
# Projections to latents and from them, the first layer's MLP, the router, experts and the shared
# expert. PEFT takes down_proj and its like for parameters of experts, so MLPs are parameters here.
LATENT_ADAPTERS = {
    "all_linears": ADAPTERS["all_linears"]
    | {
        "target_modules": [
            *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        ],
        "target_parameters": [
            *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
            *(f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")),
            *("mlp.gate.weight", *BOTH),
        ],
    },
    "some_linears": ADAPTERS["some_linears"]
    | {
        "target_modules": ["kv_b_proj"],
        "target_parameters": ["shared_experts.down_proj.weight"],
        "rank_pattern": {r"layers\.1\.self_attn\.kv_b_proj": 12},
    },
    "head": ADAPTERS["head"] | {"target_modules": ["q_b_proj", "lm_head", "embed_tokens"]},
    "rows": ADAPTERS["rows"] | {"target_modules": ["kv_a_proj_with_mqa", "o_proj"]},
    "dora": ADAPTERS["dora"]
    | {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    "biases": ADAPTERS["biases"] | {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa"]},
}
WHOLE_QUERIES_ADAPTERS = LATENT_ADAPTERS | {
    "all_linears": LATENT_ADAPTERS["all_linears"]
    | {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    "head": LATENT_ADAPTERS["head"] | {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
}
EVERY = (*FAMILIES, *MOE, *GEMMA4_MOE, *GEMMA4_E, *HYBRID, *MAMBA, *LATENT, *GPT_OSS)
IN_BLOCKS = ("gpt_oss_in_blocks",)
NEMOTRON = ("nemotron_h", "nemotron_h_latent")
# Families of the storages that not every family is tried with. Experts are not rounded to NF4, nor
# stored in 4 bits.
# Gemma 3 has every norm there is, Phi 3 stores several linears as one, Granite's keys have a gain.
SOME = {
    "nf4_weights": (*FAMILIES, *GEMMA4_E, "qwen3_5_text"),
    "packed_awq": (*FAMILIES, *GEMMA4_E),
    "packed_act_order": (*FAMILIES, *GEMMA4_E),
    "packed_mxfp4": IN_BLOCKS,
    "packed_mxfp4_of_two_ranks": IN_BLOCKS,
    "fp8_of_two_ranks": ("llama", *GEMMA4_MOE, *MOE, *HYBRID, "nemotron_h"),
    "fp8_channels": ("llama", "mistral", *GEMMA4_E, *MOE, *HYBRID, "nemotron_h"),
    "fp8_matrices": ("ministral3", "qwen2", *MOE, *HYBRID),
    "fp8_blocks": ("gemma3_text", "gemma4_text", *GEMMA4_MOE, *GEMMA4_E, *MOE, *HYBRID, *LATENT),
    "fp8_blocks_of_two_ranks": ("phi3", *GEMMA4_MOE, *MOE, *HYBRID),
    "fp8_kv_of_two_ranks": ("gemma4_text", *GEMMA4_E, "granite", *HYBRID, *NEMOTRON, *LATENT),
}
# Each family meets floats, or a storage that is as exact. Storages whose results are rounded meet a
# family of each kind: tests/engine/models rounds every family's linears. Ranks cost three times as
# much as one process: tests/engine/parallel compares every family's ranks with one process.
OFTEN = {
    "fp8_weights": ("olmo2", "nemotron_h_latent", "granitemoehybrid", "glm4_moe_lite"),
    "nf4_weights": ("qwen2", "glm", "glm4", "smollm3"),
    "packed_awq": ("phi3", "exaone4"),
    "packed_act_order": ("llama",),
    "packed_mxfp4": IN_BLOCKS,
    "packed_mxfp4_of_two_ranks": IN_BLOCKS,
    "fp8_kv": ("gemma2", "qwen3_5_text", "gpt_oss", "deepseek_v2"),
    "two_ranks": ("gemma4_moe_text",),
    "fp8_of_two_ranks": ("mixtral",),
    "fp8_channels": ("nemotron_h",),
    "fp8_matrices": ("qwen3_moe",),
    "fp8_blocks": ("gemma3_text", "deepseek_v3"),
    "fp8_blocks_of_two_ranks": ("qwen3_5_moe_text",),
    "fp8_kv_of_two_ranks": ("gemma4_e_text",),
}
_AS_EXACT = {f for name, few in OFTEN.items() if STORAGES[name].tolerance is EXACT for f in few}
OFTEN["floats"] = tuple(family for family in EVERY if family not in _AS_EXACT)
CELLS = [
    pytest.param(
        family, storage, marks=[] if family in OFTEN.get(storage, ()) else pytest.mark.soak
    )
    for family in (*EVERY, *IN_BLOCKS)
    for storage in STORAGES
    if family in SOME.get(storage, EVERY)
]


@pytest.fixture(scope="module")
def family(request, tiny_checkpoints, tmp_path_factory):
    checkpoint, folder = tiny_checkpoints[request.param], tmp_path_factory.mktemp(request.param)
    shape = BaseShape.from_config(read_config(checkpoint))
    adapters = MOE_ADAPTERS if shape.experts else ADAPTERS
    if request.param in (*GPT_OSS, *IN_BLOCKS):
        adapters = GPT_OSS_ADAPTERS
    elif shape.family == "granitemoehybrid":
        adapters = GRANITE_ADAPTERS
    elif shape.latents is not None:
        adapters = LATENT_ADAPTERS if shape.latents.query_rank else WHOLE_QUERIES_ADAPTERS
    elif request.param in MAMBA:
        adapters = MAMBA_ADAPTERS
    elif shape.family == "gemma4_moe_text":
        adapters = GEMMA4_ADAPTERS
    elif request.param in GEMMA4_E:
        adapters = GEMMA4_E_ADAPTERS
    elif shape.shared_intermediate:
        adapters = SHARED_ADAPTERS
    # where "all" trains biases that are no linears': of experts, convolutions and states
    if shape.experts or shape.recurrent or request.param in LATENT:
        of_linears = {name: adapters[name] | {"bias": "lora_only"} for name in ("dora", "biases")}
        adapters = adapters | of_linears
    adapters = adapters | {"added": ADDED, "activated": ACTIVATED}
    return SavedFamily(checkpoint, folder, adapters, WEIGHTS)


@pytest.fixture(scope="module")
def served(request, family, tmp_path_factory):
    """Answers of an engine, and the reference for them."""
    storage, folder = STORAGES[request.param], tmp_path_factory.mktemp("cache")
    checkpoint, weights = storage.stored(family.checkpoint, folder)
    answers = answers_of(family, storage, checkpoint, folder)
    return answers, StoredReference(family, storage, weights)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("family", "served"), CELLS, indirect=True, scope="module")
def test_an_engine_answers_as_its_reference_does(served, feature):
    answers, reference = served
    shown = [answer for answer in answers if FEATURES[feature](answer)]
    assert shown
    errors = [assert_equal(answer, reference) for answer in shown]
    if len(errors) > 2:
        # One number that is rounded the other way changes all of an answer behind it.
        assert sorted(errors)[len(errors) // 4] <= EXACT.median, "such numbers are rare"


def test_make_test_tries_every_family_exactly_and_every_storage():
    assert OFTEN.keys() == STORAGES.keys()
    assert all(set(OFTEN[name]) <= set(SOME.get(name, EVERY)) for name in STORAGES)
    assert {*EVERY, *IN_BLOCKS} == {*OFTEN["floats"], *_AS_EXACT}
