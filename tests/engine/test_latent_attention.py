"""Whole engine over models with latent attention: adapters equal PEFT's; sizes and refusals."""

import json
from dataclasses import replace

import pytest
import torch

from loadtest.engine.random_model import CONFIGS
from lorikeet_engine.adapter_format import BaseShape, read_config
from lorikeet_engine.errors import ModelError, SettingsError
from lorikeet_engine.execution.kv_tensors import kv_shape
from lorikeet_engine.execution.memory_plan import step_bytes
from lorikeet_engine.kernels.moe import Sigmoids, route
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.parallel.shard import Shard
from tests.engine.conftest import LATENT, save_all
from tests.engine.engine_driver import Answers, build
from tests.engine.models.test_models import Run, prompt_of, reference
from tests.engine.modes import in_worlds, modes
from tests.engine.moe_adapters import BOTH
from tests.engine.peft_world import PeftWorld, ask
from tests.engine.tiny_engine import SETTINGS

LATENTS = ["q_a_proj", "kv_a_proj_with_mqa"]
ADAPTERS = {
    "all": {"r": 4, "target_modules": "all-linear"},
    "keys and values": {"r": 5, "target_modules": ["kv_b_proj"], "lora_alpha": 30},
    "wide": {"r": 24, "target_modules": ["kv_b_proj", "o_proj"], "use_rslora": True},
    "latents": {"r": 3, "target_modules": LATENTS},
    "queries": {"r": 8, "target_modules": ["q_b_proj"]},
    "one layer": {"r": 4, "target_modules": ["kv_b_proj"], "layers_to_transform": [1]},
    "experts": {"r": 4, "target_modules": ["o_proj"], "target_parameters": BOTH},
    "shared": {
        "r": 4,
        "target_modules": ["kv_b_proj"],
        "target_parameters": ["shared_experts.up_proj.weight", "mlp.down_proj.weight"],
    },
    "head": {"r": 4, "target_modules": ["kv_b_proj", "lm_head", "embed_tokens"]},
}
OF_WHOLE_QUERIES = ADAPTERS | {
    "latents": {"r": 3, "target_modules": ["kv_a_proj_with_mqa"]},
    "queries": {"r": 8, "target_modules": ["q_proj"]},
}
BASES = "glm4_moe_lite", "deepseek_v3", "deepseek_v3_whole_queries", "deepseek_v2"


@pytest.fixture(scope="module", params=BASES)
def world(request, tiny_checkpoints, tmp_path_factory):
    folder, checkpoint = tmp_path_factory.mktemp("latents"), tiny_checkpoints[request.param]
    latents = BaseShape.from_config(read_config(checkpoint)).latents
    adapters = ADAPTERS if latents.query_rank else OF_WHOLE_QUERIES
    return PeftWorld(checkpoint, folder, adapters, tokens=12, longer=29)


@pytest.mark.parametrize(
    ("world", "settings"),
    in_worlds(BASES, modes(30, 400), on_ranks="deepseek_v2"),
    indirect=["world"],
    scope="module",
)
@pytest.mark.usefixtures("forked_followers")
def test_adapters_equal_peft_in_one_batch(world, tmp_path, close_later, settings):
    sizes = {"max_running": 9, "max_batch_adapters": 9, **settings}
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path / "cache", **sizes))
    assert ask(world, Answers(engine)) == world.expected
    assert len({tuple(tokens) for tokens in world.expected.values()}) == len(world.names)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_page_holds_latents_and_shared_keys_alone(tmp_path, ranks):
    (tmp_path / "config.json").write_text(json.dumps(dict(CONFIGS["glm-4.7-flash"])))
    config = ModelConfig.from_folder(tmp_path)
    shape = Shard(0, ranks).part_of(config.shape)
    pages = torch.empty(kv_shape(config, shape, 7, 16, "cuda"), device="meta")
    assert pages.numel() == 47 * 7 * 16 * (512 + 64)


def test_a_step_has_room_for_every_heads_absorbed_queries_and_outputs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(CONFIGS["glm-4.7-flash"])))
    config = ModelConfig.from_folder(tmp_path)
    shape, settings = config.shape, replace(SETTINGS, dtype="bfloat16", max_batch_tokens=1000)
    twice = replace(shape, heads=2 * shape.heads)
    more = step_bytes(config, twice, settings) - step_bytes(config, shape, settings)
    # queries of 256, absorbed ones of 512 + 64, outputs of 512, and behind them of 256
    assert more == 1000 * 2 * shape.heads * (256 + 576 + 512 + 256)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("q_lora_rank", None),
        ("attention_bias", True),
        ("num_key_value_heads", 2),
        ("qk_rope_head_dim", 7),
        ("first_k_dense_replace", 2),
        ("n_group", 5),
        ("topk_group", 5),
        ("topk_method", "greedy"),
        ("scoring_func", "softmax"),
    ],
)
def test_a_switch_that_no_model_of_the_family_has_is_refused_by_name(
    field, value, tiny_checkpoints, tmp_path
):
    config = json.loads((tiny_checkpoints["glm4_moe_lite"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("q_lora_rank", 28),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("norm_topk_prob", True),
        ("routed_scaling_factor", 16.0),
        ("scoring_func", "sigmoid"),
        ("topk_method", "group_limited_greedy"),
    ],
)
def test_deepseek_v2_is_refused_by_name_unless_it_is_lite(field, value, tiny_checkpoints, tmp_path):
    config = json.loads((tiny_checkpoints["deepseek_v2"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert caught.value.field == field


def test_null_says_that_queries_have_no_latents(tiny_checkpoints, tmp_path):
    """A config.json without the key has the default of transformers, 1,536 elements."""
    folder = tiny_checkpoints["deepseek_v3_whole_queries"]
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("q_lora_rank", 0) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_folder(tmp_path).shape.latents.query_rank == 1536
    assert ModelConfig.from_folder(folder).shape.latents.query_rank == 0


def test_a_gpu_without_kernels_for_its_latents_refuses_a_model_by_name(tiny_checkpoints):
    with pytest.raises(SettingsError, match=r"kv_lora_rank=36, qk_rope_head_dim=8: GPU kernels"):
        load_model(tiny_checkpoints["glm4_moe_lite"], torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("kinds", [["sparse"] * 3, ["dense", "sparse", "dense"]])
def test_any_layer_may_be_dense(kinds, tmp_path, paged_tokens):
    changes = {"mlp_layer_types": kinds, "n_shared_experts": 2, "rope_interleave": False}
    folder = save_all({"a": LATENT["glm4_moe_lite"] | changes}, tmp_path)["a"]
    run, prompt = Run(folder, paged_tokens()), prompt_of(40)
    run.step({"a": prompt})
    torch.testing.assert_close(run.of("a"), reference(folder, prompt), rtol=0, atol=1e-4)


def test_experts_are_chosen_from_the_kept_groups():
    logits = torch.randn(9, 12, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(12, generator=torch.Generator().manual_seed(2)) / 4
    sigmoids = Sigmoids(bias, 2.0, groups=4, kept_groups=2)
    routed = route(logits, 3, normalised=True, sigmoids=sigmoids)
    scores = logits.sigmoid() + bias
    groups = scores.view(9, 4, 3).topk(2).values.sum(-1).topk(2).indices
    for token, experts in enumerate(routed.experts):
        allowed = [e for e in range(12) if e // 3 in groups[token]]
        best = sorted(allowed, key=lambda e: -scores[token, e])[:3]
        assert experts.tolist() == best
    all_kept = replace(sigmoids, kept_groups=4)
    plain = route(logits, 3, normalised=True, sigmoids=Sigmoids(bias, 2.0))
    torch.testing.assert_close(
        route(logits, 3, normalised=True, sigmoids=all_kept).experts, plain.experts
    )


def test_shared_experts_count_in_widths_of_an_expert(tiny_checkpoints):
    config = dict(read_config(tiny_checkpoints["glm4_moe_lite"]))
    assert BaseShape.from_config(config | {"n_shared_experts": 3}).shared_intermediate == 120
