"""Whole engine over models with Mamba 2: adapters equal PEFT's, and states change no token."""

import json
import shutil

import peft
import pytest
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import (
    AdapterLimits,
    BaseShape,
    read_config,
    read_spec,
    write_blob,
)
from lorikeet_engine.errors import AdapterRejected
from tests.engine.engine_driver import Answers, RecordingRunner, build, greedy, prompt
from tests.engine.peft_world import PeftWorld, ask

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["fc1_latent_proj", "fc2_latent_proj"]
ADAPTERS = {
    "all": {"r": 4, "target_modules": "all-linear"},
    "default": {"r": 8, "target_modules": ATTENTION},
    "mamba": {"r": 5, "target_modules": ["in_proj", "out_proj"], "rank_pattern": {"out_proj": 2}},
    "in": {"r": 3, "target_modules": ["in_proj"], "use_rslora": True},
    "mlp": {"r": 6, "target_modules": ["up_proj", "down_proj"]},
    "router": {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mixer.gate.weight"]},
    "one layer": {"r": 4, "target_modules": ["in_proj", "q_proj"], "layers_to_transform": [4]},
    "head": {"r": 4, "target_modules": ["out_proj", "lm_head", "embeddings"]},
}
BASES = {
    "nemotron_h": ADAPTERS,
    "nemotron_h_latent": {
        "all": ADAPTERS["all"],
        "latent": {"r": 3, "target_modules": [*LATENT, "shared_experts.up_proj"]},
        "narrow": {"r": 4, "target_modules": [LATENT[1], "v_proj"]},
        "mamba": ADAPTERS["mamba"],
    },
}


@pytest.fixture(scope="module")
def every_linear():
    """Let PEFT adapt out_proj, too, which trainers other than PEFT adapt.

    PEFT refuses this, because the kernels of mamba_ssm read its weight around LoRA; these tests
    run without these kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.tuners.tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
        yield


@pytest.fixture(scope="module", params=BASES)
def world(request, tiny_checkpoints, tmp_path_factory, every_linear):
    folder = tmp_path_factory.mktemp("mamba")
    checkpoint = tiny_checkpoints[request.param]
    return PeftWorld(checkpoint, folder, BASES[request.param], tokens=12, longer=29)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_tokens": 16},
        {"kv_pages": 24, "max_context": 280},
        {"tensor_parallel": 2},
        {"overlap": False},
    ],
    ids=["at once", "in chunks", "preempted", "on two ranks", "step by step"],
)
@pytest.mark.usefixtures("forked_followers")
def test_adapters_equal_peft_in_one_batch(world, tmp_path, close_later, settings):
    sizes = {"max_running": 9, "max_batch_adapters": 8, **settings}
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path / "cache", **sizes))
    assert ask(world, Answers(engine)) == world.expected
    assert len({tuple(tokens) for tokens in world.expected.values()}) == len(world.names)
