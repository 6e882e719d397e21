"""FP8 checkpoints are served as models of the floats that their numbers stand for."""

import json
from math import ceil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.fp8 import DTYPE, Fp8Rows, PartlyFp8
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.experts import Experts
from lorikeet_engine.models.linears import LoraLinear
from lorikeet_engine.models.llama import load_model, rehearse_load
from lorikeet_engine.models.stored_tensors import SINGLE
from lorikeet_engine.parallel.shard import WHOLE
from tests.engine.conftest import HYBRID, MOE, PagedTokens, save_all
from tests.engine.models.fp8_models import rounded_model
from tests.engine.models.quantized_checkpoints import (
    BLOCK,
    CONFIGS,
    SCALES,
    compressed_tensors,
    expanded,
    linears,
    saved,
    scales_of,
    write_fp8,
)
from tests.engine.models.test_fp8_rounding import assert_near
from tests.engine.models.test_models import Run, prompt_of
from tests.engine.models.test_moe_checkpoints import as_whole
from tests.engine.pairs import pairs

CPU = torch.device("cpu")
PROMPT = prompt_of(40)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def logits(folder, dtype=torch.float32):
    run = Run(None, PagedTokens(), dtype, model=load_model(folder, CPU, dtype))
    run.step({"a": PROMPT})
    return run.of("a")


def floats_logits(model):
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize(
    ("family", "kind"),
    pairs(["llama", "qwen2", "qwen3", *MOE, *HYBRID, "nemotron_h_latent"], [*CONFIGS]),
)
def test_its_numbers_are_served_as_they_are(tiny_checkpoints, tmp_path, family, kind):
    folder, floats = write_fp8(tiny_checkpoints[family], tmp_path, kind)
    assert_near(logits(folder), floats_logits(rounded_model(tiny_checkpoints[family], floats)))


# Rows and columns of whole blocks, as of Qwen's models: transformers divides others differently.
WHOLE_BLOCKS = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}


@pytest.mark.parametrize("family", HYBRID)
def test_numbers_of_hybrids_are_those_that_transformers_reads(tmp_path, family):
    plain = save_all({family: HYBRID[family] | WHOLE_BLOCKS}, tmp_path)[family]
    folder, _ = write_fp8(plain, tmp_path, "blocks")
    want = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = ModelConfig.from_folder(folder)
    with Checkpoint(folder, CPU, torch.float32, config.quantized_linears) as checkpoint:
        read = [weights_of(config, checkpoint, layer) for layer in range(config.shape.layers)]
    for layer, weights in enumerate(read):
        for group, weight in weights.items():
            never = {"delta_in": PartlyFp8, "router": torch.Tensor, "shared_weight": torch.Tensor}
            assert isinstance(weight, never.get(group, Fp8Rows))
            assert torch.equal(floats_of(weight), stacked(want, config.shape, layer, group))


def weights_of(config, checkpoint, layer):
    """Return the weights of a layer's groups of linears, and of its experts, by group."""
    shape, weights = config.shape, {}
    for group, indices in shape.groups.items():
        if shape.has(layer, indices[0]) and not shape.linears[indices[0]].of_experts:
            weights[group] = LoraLinear(checkpoint, shape, layer, group, bias=False).weight
    if shape.experts:
        experts = Experts(config, checkpoint, layer)
        weights |= {"expert_gate_up": experts.gate_up, "expert_down": experts.down}
    return weights


def floats_of(weight):
    if isinstance(weight, PartlyFp8):
        return torch.cat([weight.first.floats(), weight.others])
    return weight.floats() if isinstance(weight, Fp8Rows) else weight


def stacked(model, shape, layer, group):
    """Return the weights of a group in transformers' model, in the order of the products' rows."""
    if group.startswith("expert"):
        name = group.removeprefix("expert_")
        return model.get_parameter(f"model.layers.{layer}.mlp.experts.{name}_proj")
    kept = WHOLE.ranges(shape)
    return torch.cat(
        [
            model.get_parameter(f"{shape.linears[n].path(layer)}.weight")[rows.start : rows.stop]
            for n in shape.groups[group]
            for rows in kept[n].outputs
        ]
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
def test_experts_of_fp8_with_scales_of_blocks_can_be_one_tensor(tiny_checkpoints, tmp_path, family):
    whole = as_whole(tiny_checkpoints[family], tmp_path / "whole")
    folder, floats = write_fp8(whole, tmp_path, "blocks")
    model = rounded_model(tiny_checkpoints[family], floats)
    assert_near(logits(folder), floats_logits(model))


def test_linears_that_were_left_out_are_floats(tiny_checkpoints, tmp_path):
    plain = tiny_checkpoints["qwen2"]
    folder, floats = write_fp8(plain, tmp_path, "dynamic")
    _, original = linears(plain)
    tensors = load_file(folder / SINGLE)
    for linear in ("mlp.down_proj", "self_attn.v_proj"):  # one of a group's makes all floats
        name = f"model.layers.1.{linear}.weight"
        tensors[name] = floats[name] = original[name]
        del tensors[f"{name}_scale"]
    folder = saved(plain, tmp_path / "mixed", tensors, quantization_config=CONFIGS["dynamic"])
    model = rounded_model(plain, floats)
    layer = model.model.layers[1]
    attention = layer.self_attn
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, layer.mlp.down_proj):
        linear.__class__ = torch.nn.Linear
    assert_near(logits(folder), floats_logits(model))


def test_an_expert_that_was_left_out_makes_all_of_its_kind_floats(tiny_checkpoints, tmp_path):
    plain = tiny_checkpoints["qwen3_moe"]
    folder, floats = write_fp8(plain, tmp_path, "dynamic")
    tensors, name = load_file(folder / SINGLE), "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name] = floats[name] = linears(plain)[1][name]
    del tensors[f"{name}_scale"]
    folder = saved(plain, tmp_path / "mixed", tensors, quantization_config=CONFIGS["dynamic"])
    model = rounded_model(plain, floats)
    model.model.layers[1].mlp.experts.rounds = ("gate_up_proj",)
    assert_near(logits(folder), floats_logits(model))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_router_that_is_fp8_gets_its_exact_values(tiny_checkpoints, tmp_path, kind):
    plain = tiny_checkpoints["qwen3_moe"]
    folder, _ = write_fp8(plain, tmp_path, kind)
    tensors, name = load_file(folder / SINGLE), "model.layers.0.mlp.gate.weight"
    scales = scales_of(kind, tensors[name])
    wide = expanded(scales, tensors[name].shape, kind)
    tensors[name] = (tensors[name] / wide).to(DTYPE)
    tensors[name.replace("weight", SCALES.get(kind, "weight_scale"))] = scales
    folder = saved(plain, tmp_path / "router", tensors, quantization_config=CONFIGS[kind])
    model = load_model(folder, CPU, torch.float32)
    assert torch.equal(model._layers[0].mlp.router.weight, tensors[name].float() * wide)


def test_experts_of_fp8_that_are_one_tensor_are_refused_by_name(tiny_checkpoints, tmp_path):
    plain = tiny_checkpoints["qwen3_moe"]
    folder, _ = write_fp8(plain, tmp_path, "dynamic")
    tensors, whole = load_file(folder / SINGLE), "model.layers.0.mlp.experts.down_proj"
    tensors[whole] = torch.zeros(6, 64, 48).to(DTYPE)
    save_file(tensors, folder / SINGLE)
    with pytest.raises(ModelError, match=r"F8_E4M3.* or take a copy that is not quant") as refused:
        rehearse_load(folder, torch.float32)
    assert refused.value.field == whole


def test_a_head_that_is_fp8_gets_its_exact_values(tiny_checkpoints, tmp_path):
    plain = tiny_checkpoints["llama"]
    folder, floats = write_fp8(plain, tmp_path, "dynamic")
    tensors = load_file(folder / SINGLE)
    head = tensors["lm_head.weight"]
    scales = scales_of("dynamic", head)
    tensors |= {"lm_head.weight": (head / scales.float()).to(DTYPE), "lm_head.weight_scale": scales}
    folder = saved(plain, tmp_path / "head", tensors, quantization_config=CONFIGS["dynamic"])
    model = rounded_model(plain, floats)
    model.lm_head.weight.data = tensors["lm_head.weight"].float() * scales.float()
    assert_near(logits(folder), floats_logits(model))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("family", ["llama", *MOE])
def test_a_rehearsal_counts_a_byte_for_a_number_and_four_for_a_scale(
    tiny_checkpoints, tmp_path, family, kind
):
    plain = tiny_checkpoints[family]
    folder, floats = write_fp8(plain, tmp_path, kind)

    def scales(weight):
        rows, columns = weight.shape
        if "blocks" not in kind:
            return rows
        return ceil(rows / BLOCK[0]) * ceil(columns / BLOCK[1])

    saved_bytes = sum(w.numel() * (2 - 1) - 4 * scales(w) for w in floats.values())
    without = rehearse_load(plain, torch.bfloat16)[1]
    assert rehearse_load(folder, torch.bfloat16)[1] == without - saved_bytes
    assert ModelConfig.from_folder(folder).quantized_linears.format is Quantization.FP8


def test_stored_fp8_is_unchanged_when_floats_are_rounded_to_fp8(tiny_checkpoints, tmp_path):
    folder, _ = write_fp8(tiny_checkpoints["llama"], tmp_path, "dynamic")
    model = load_model(folder, CPU, torch.float32, rounding=Quantization.FP8)
    run = Run(None, PagedTokens(), model=model)
    run.step({"a": PROMPT})
    assert torch.equal(run.of("a"), logits(folder))
    with pytest.raises(ModelError, match="quantised already, as fp8"):
        load_model(folder, CPU, torch.float32, rounding=Quantization.NF4)


DYNAMIC = {"dynamic": True, "strategy": "token"}


def rotated(location):
    """transform_config of compressed-tensors' TransformConfig: down's inputs and its weight."""
    apply = [
        {"targets": ["down_proj"], "location": where, "inverse": where == "weight_input"}
        for where in ("weight_input", location)
    ]
    return {"config_groups": {"R4": {"type": "hadamard", "apply": apply, "head_dim": None}}}


def of_groups(*kinds):
    """quantization_config of compressed-tensors with a group of each kind."""
    groups = [CONFIGS[kind]["config_groups"]["group_0"] for kind in kinds]
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return CONFIGS["dynamic"] | {"config_groups": named}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": of_groups("dynamic", "static")},
        {"compression_config": CONFIGS["static"]},  # compressed-tensors up to 0.5
        {"quantization_config": CONFIGS["dynamic"] | {"ignore": ["re:.*lm_head"]}},
        {
            "quantization_config": CONFIGS["dynamic"]
            | {"sparsity_config": {}, "transform_config": rotated("weight_output")}
        },
    ],
    ids=["groups", "first_name", "regex", "nothing_else"],
)
def test_compressed_tensors_other_words_for_the_same_are_read(tiny_checkpoints, tmp_path, config):
    folder, _ = write_fp8(tiny_checkpoints["llama"], tmp_path, "dynamic")
    other = saved(tiny_checkpoints["llama"], tmp_path / "other", load_file(folder / SINGLE))
    path = other / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    assert torch.equal(logits(other), logits(folder))


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo"),
        (compressed_tensors({"num_bits": 4}, DYNAMIC), "config_groups.group_0.weights"),
        (compressed_tensors({"type": "int"}, DYNAMIC), "config_groups.group_0.weights"),
        (
            compressed_tensors({"strategy": "channel"}, {"num_bits": 16}),
            "config_groups.group_0.input_activations",
        ),
        (CONFIGS["dynamic"] | {"sparsity_config": "2:4"}, "sparsity_config"),
        (
            CONFIGS["dynamic"] | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format",
        ),
        (CONFIGS["dynamic"] | {"transform_config": rotated("input")}, "transform_config"),
        (of_groups("dynamic", "compressed_blocks"), "config_groups"),
        (compressed_tensors({"strategy": "group"}, DYNAMIC), "strategy"),
        (compressed_tensors({"strategy": "channel", "symmetric": False}, DYNAMIC), "symmetric"),
        (compressed_tensors({"strategy": "block"}, DYNAMIC), "block_structure"),
    ],
)
def test_other_schemes_are_refused_by_name(edited, quantization, field):
    with pytest.raises(ModelError, match=r"take a copy that is not quantised") as refused:
        ModelConfig.from_folder(edited("llama", quantization_config=quantization))
    assert refused.value.field == f"quantization_config.{field}"


def test_modelopts_own_config_file_is_read(tiny_checkpoints, tmp_path):
    folder, _ = write_fp8(tiny_checkpoints["llama"], tmp_path, "modelopt")
    alone = saved(tiny_checkpoints["llama"], tmp_path / "alone", load_file(folder / SINGLE))
    with pytest.raises(ModelError, match=r"F8_E4M3 .* which config\.json does not mention"):
        rehearse_load(alone, torch.float32)
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    file = {"producer": {"name": "modelopt", "version": "0.19.0"}, "quantization": said}
    (alone / "hf_quant_config.json").write_text(json.dumps(file))
    assert torch.equal(logits(alone), logits(folder))


def test_a_weight_without_its_scales_is_named(tiny_checkpoints, tmp_path):
    folder, _ = write_fp8(tiny_checkpoints["llama"], tmp_path, "dynamic")
    tensors, name = load_file(folder / SINGLE), "model.layers.1.mlp.up_proj.weight"
    del tensors[f"{name}_scale"]
    save_file(tensors, folder / SINGLE)
    with pytest.raises(
        ModelError, match=r"F8_E4M3 .*, without scales under a known name"
    ) as refused:
        rehearse_load(folder, torch.float32)
    assert refused.value.field == name


def test_weights_without_rounding_of_inputs_are_refused(edited):
    config = compressed_tensors({"strategy": "channel"}, DYNAMIC)
    config["config_groups"]["group_0"]["input_activations"] = None
    with pytest.raises(ModelError, match="input_activations"):
        ModelConfig.from_folder(edited("llama", quantization_config=config))


@pytest.mark.parametrize(
    ("part", "spoil"),
    [
        ("weight_scale", lambda tensor: tensor[:-1]),
        ("weight_scale", lambda tensor: tensor.to(torch.float8_e8m0fnu)),
        ("weight", lambda tensor: tensor[:-1]),
        ("weight", lambda tensor: tensor.to(torch.float8_e5m2)),
    ],
)
def test_a_part_that_does_not_fit_is_named_before_anything_is_loaded(
    tiny_checkpoints, tmp_path, part, spoil
):
    folder, _ = write_fp8(tiny_checkpoints["llama"], tmp_path, "dynamic")
    name = f"model.layers.1.mlp.up_proj.{part}"
    tensors = load_file(folder / SINGLE)
    tensors[name] = spoil(tensors[name])
    save_file(tensors, folder / SINGLE)
    with pytest.raises(ModelError, match="want") as refused:
        rehearse_load(folder, torch.float32)
    assert refused.value.field == name
