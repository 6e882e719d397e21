"""Gemma 4 E2B and E4B: layers that read other layers' keys, and inputs of each layer."""

import json
import math
import re
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from loadtest.engine.random_model import GEMMA_4_E2B, GEMMA_4_E4B
from lorikeet_engine.adapter_format import AdapterLimits, BaseShape, read_config, write_blob
from lorikeet_engine.adapter_format.families import LayerKind
from lorikeet_engine.adapter_format.spec import read_spec
from lorikeet_engine.errors import AdapterRejected, ModelError
from lorikeet_engine.execution.kv_tensors import kv_shape
from lorikeet_engine.execution.memory_plan import step_bytes
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.llama import load_model, rehearse_load
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.settings import EngineSettings
from tests.engine.adapter_format.peft_folder import edit_config
from tests.engine.conftest import GEMMA4_E, SIZES, PagedTokens
from tests.engine.models.test_models import Run, assert_equal, prompt_of, reference

NAME = "gemma4_e_text"
LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 24)
PROMPT = prompt_of(60)
WEIGHTS = "model.safetensors"


def logits(folder):
    model = load_model(folder, torch.device("cpu"), torch.float32)
    run = Run(folder, PagedTokens(), model=model)
    run.step({"a": PROMPT[:37]})
    run.step({"a": PROMPT[37:]})
    return run.of("a")


def with_tensors(folder, target, tensors):
    """Copy a checkpoint and add tensors to it; None removes one."""
    shutil.copytree(folder, target)
    kept = load_file(target / WEIGHTS) | tensors
    save_file({n: t for n, t in kept.items() if t is not None}, target / WEIGHTS)
    return target


def config_of(raw, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_folder(tmp_path)


def test_keys_and_values_of_layers_that_read_others_are_left_in_the_checkpoint(
    tiny_checkpoints, tmp_path
):
    """As Google's checkpoints have them."""
    checkpoint, shape = (
        tiny_checkpoints[NAME],
        BaseShape.from_config(read_config(tiny_checkpoints[NAME])),
    )
    unused = {}
    for layer in (n for n in range(shape.layers) if shape.kv_owner(n) != n):
        heads, path = shape.heads_of(layer), f"model.layers.{layer}.self_attn"
        for part in "kv":
            weight = torch.full((heads.kv_heads * heads.head_dim, shape.hidden), torch.nan)
            unused[f"{path}.{part}_proj.weight"] = weight
        unused[f"{path}.k_norm.weight"] = torch.full((heads.head_dim,), torch.nan)
    assert len(unused) == 6
    folder = with_tensors(checkpoint, tmp_path / "published", unused)
    assert torch.equal(logits(folder), logits(checkpoint))
    owner = unused.popitem()[1]
    other = with_tensors(checkpoint, tmp_path / "other", {"model.layers.0.self_attn.x": owner})
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.x and 0 more tensors"):
        load_model(other, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        *("model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"),
        *("model.per_layer_projection_norm.weight", "model.layers.4.per_layer_projection.weight"),
        *("model.layers.3.per_layer_input_gate.weight", "model.layers.2.self_attn.v_proj.weight"),
        "model.layers.1.post_per_layer_input_norm.weight",
    ],
)
def test_every_tensor_is_needed_and_changes_the_logits(name, tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints[NAME]
    lacking = with_tensors(checkpoint, tmp_path / "lacking", {name: None})
    with pytest.raises(ModelError, match=name):
        rehearse_load(lacking, torch.float32)
    weight = load_file(checkpoint / WEIGHTS)[name]
    folder = with_tensors(checkpoint, tmp_path / "other", {name: weight.flip(0).contiguous()})
    got = logits(folder)
    assert_equal(got, reference(folder, PROMPT))
    assert (got - logits(checkpoint)).abs().max() > 0.01


def test_rows_of_tokens_beyond_the_vocabulary_are_left_in_the_checkpoint(tiny_checkpoints):
    config, nbytes = rehearse_load(tiny_checkpoints[NAME], torch.float32)
    assert config.layer_input_rows == 261
    stored = load_file(tiny_checkpoints[NAME] / WEIGHTS)
    unused = 5 * config.shape.layers * config.shape.layer_input
    assert nbytes == 4 * (sum(map(torch.Tensor.numel, stored.values())) - unused - 5)  # scalars


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_keeps_the_embeddings_of_all_layers(ranks, tiny_checkpoints):
    stored = load_file(tiny_checkpoints[NAME] / WEIGHTS)
    whole = [n for n in stored if "per_layer" in n or "norm" in n or "embed_tokens" in n]
    _, nbytes = rehearse_load(tiny_checkpoints[NAME], torch.float32, shard=Shard(0, ranks))
    parts = {n: t.numel() for n, t in stored.items() if not n.endswith("layer_scalar")}
    unused = 5 * stored["model.embed_tokens_per_layer.weight"].shape[1]
    kept = sum(size if n in whole else size // ranks for n, size in parts.items())
    assert nbytes == 4 * (kept - unused)


@pytest.mark.parametrize(
    ("raw", "owners", "token_bytes"),
    [(GEMMA_4_E4B, 24, 2 * 2 * (20 * 512 + 4 * 1024)), (GEMMA_4_E2B, 15, 4 * (12 * 256 + 3 * 512))],
)
def test_pages_hold_the_layers_that_have_keys_and_values_alone(raw, owners, token_bytes, tmp_path):
    config = config_of(raw, tmp_path)
    shape, groups = config.shape, config.kv_groups
    assert sum(kind.has_kv for kind in shape.kinds) == owners
    assert len(set(groups.places)) == owners
    for layer, place in enumerate(groups.places):
        owner = shape.kv_owner(layer)
        assert place == groups.places[owner]
        assert config.windows[layer] == config.windows[owner] == groups.windows[place.group]
        assert shape.heads_of(layer) == shape.heads_of(owner)
        own = LayerKind.WINDOW if shape.kind(layer).has_window else LayerKind.ATTENTION
        before = [n for n in range(min(layer + 1, owners)) if shape.kind(n) is own]
        assert owner == before[-1]
    page = math.prod(kv_shape(config, shape, 1, 16, "cpu")) * 2
    assert token_bytes <= page * len(groups.windows) / 16 <= 1.1 * token_bytes


def test_steps_are_planned_with_the_inputs_of_all_layers_and_the_wide_mlp(tmp_path):
    settings = EngineSettings(
        tmp_path, tmp_path, device="cpu", dtype="bfloat16", max_batch_tokens=1000
    )
    planned = {}
    for name, changes in {
        "whole": {},
        "narrow": {"use_double_wide_mlp": False},
        "fewer": {"hidden_size_per_layer_input": 128},
    }.items():
        config = config_of(GEMMA_4_E2B | changes, tmp_path)
        planned[name] = step_bytes(config, config.shape, settings)
    assert planned["whole"] - planned["narrow"] == 1000 * 2 * 3 * 6144
    assert planned["whole"] - planned["fewer"] == 1000 * 2 * 35 * 128


def test_layers_that_read_others_read_them_with_their_scales(tiny_checkpoints, tmp_path):
    """Of FP8 pages: those of the layer that has stored them."""
    names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in (1, 2) for part in "kv"]
    scales = {name: torch.tensor(at + 0.5) for at, name in enumerate(names)}
    folder = with_tensors(tiny_checkpoints[NAME], tmp_path / "scaled", scales)
    model = load_model(folder, torch.device("cpu"), torch.float32)
    found = [layer.mixer.kv_scales for layer in model._layers]
    assert (found[3], found[4]) == (found[2], found[1])
    assert [found[n].key for n in range(3)] == [1.0, 0.5, 2.5]
    assert [found[n].value for n in range(3)] == [1.0, 1.5, 3.5]


def trained(checkpoint, folder, targets):
    """Save an adapter of PEFT's with random matrices; return its tensors."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    lora = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(folder)
    return load_file(folder / "adapter_model.safetensors")


def spec_of(folder, checkpoint):
    write_blob(folder, folder / "blob")
    return read_spec(folder / "blob", BaseShape.from_config(read_config(checkpoint)), LIMITS)


def test_all_linear_has_what_peft_finds(tiny_checkpoints, tmp_path):
    tensors = trained(tiny_checkpoints[NAME], tmp_path, "all-linear")
    spec = spec_of(tmp_path, tiny_checkpoints[NAME])
    assert len(spec.linears) == len(tensors) // 2
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    kinds += ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]
    assert set(spec.touches.linears) == set(kinds)
    assert spec.touches.layers == 5


@pytest.mark.parametrize("side", ["q_proj", "per_layer_input_gate", "per_layer_model_projection"])
def test_a_targeted_linear_without_weights_is_missed(side, tiny_checkpoints, tmp_path):
    tensors = trained(tiny_checkpoints[NAME], tmp_path, "all-linear")
    lost = next(name for name in reversed(tensors) if f".{side}." in name).rpartition(".lora_")[0]
    kept = {name: each for name, each in tensors.items() if not name.startswith(f"{lost}.")}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterRejected, match=f"{side}, but no weight|that have no weights"):
        spec_of(tmp_path, tiny_checkpoints[NAME])


@pytest.mark.parametrize("targets", [["k_proj"], ["q_proj", "v_proj"]])
def test_keys_and_values_of_a_layer_that_reads_others_are_refused_by_name(
    targets, tiny_checkpoints, tmp_path
):
    """As an earlier transformers, which had such linears there, saves them."""
    tensors = trained(tiny_checkpoints[NAME], tmp_path, targets)
    for name, own in [*tensors.items()]:
        for owner, reader in (("layers.1", "layers.4"), ("layers.2", "layers.3")):
            if owner in name:
                tensors[name.replace(owner, reader)] = own.clone()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    words = "layer 3 of the base model is attention with a window to another layer's keys and "
    with pytest.raises(AdapterRejected, match=f"{words}values and has no {targets[-1]}; .* remove"):
        spec_of(tmp_path, tiny_checkpoints[NAME])
    kept = {name: t for name, t in tensors.items() if not re.search(r"\.[34]\..*[kv]_proj", name)}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    spec_of(tmp_path, tiny_checkpoints[NAME])


def test_embeddings_of_layers_are_refused_by_name(tiny_checkpoints, tmp_path):
    trained(tiny_checkpoints[NAME], tmp_path, ["q_proj", "embed_tokens_per_layer"])
    with pytest.raises(AdapterRejected, match="embed_tokens_per_layer"):
        spec_of(tmp_path, tiny_checkpoints[NAME])


def test_inputs_of_layers_are_refused_on_a_base_model_without_them(tiny_checkpoints, tmp_path):
    trained(tiny_checkpoints[NAME], tmp_path, ["per_layer_model_projection"])
    assert spec_of(tmp_path, tiny_checkpoints[NAME]).touches.layers == 0
    edit_config(tmp_path, target_modules=None)
    write_blob(tmp_path, tmp_path / "other")
    other = BaseShape.from_config(read_config(tiny_checkpoints["gemma4_text"]))
    with pytest.raises(AdapterRejected, match=r"no model\.per_layer_model_projection"):
        read_spec(tmp_path / "other", other, LIMITS)


def test_a_checkpoint_that_sees_and_hears_is_served_as_its_text_part(tmp_path):
    settings = {
        "text_config": {**SIZES, **GEMMA4_E[NAME], "tie_word_embeddings": True},
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "output_proj_dims": 32,
        },
        "tie_word_embeddings": True,
    }
    config = transformers.AutoConfig.for_model("gemma4", **settings)
    torch.manual_seed(7)
    model = transformers.Gemma4ForConditionalGeneration(config).float().eval()
    for name, weight in model.named_parameters():
        if "language_model" in name and weight.dim() == 1:
            weight.data.normal_(1.0, 0.3)
            if "q_norm" in name:
                weight.data /= len(weight) ** 0.5
    model.save_pretrained(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / WEIGHTS)
    assert any("audio_tower" in name for name in stored)
    assert any("vision_tower" in name for name in stored)
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([PROMPT])).logits[0]
    assert_equal(logits(tmp_path / "saved"), want)
