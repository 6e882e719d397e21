"""Adapters that are no plain LoRA of the base model are refused by name, with a remedy."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lorikeet_engine.adapter_format import (
    AdapterLimits,
    check_values,
    read_spec,
    write_blob,
)
from lorikeet_engine.adapter_format.header import MAX_HEADER_BYTES
from lorikeet_engine.errors import AdapterRejected, AdapterTooLarge
from tests.engine.adapter_format.peft_folder import edit_config, edit_weights
from tests.engine.tiny_llama import CONFIG, SHAPE

LIMITS = AdapterLimits(max_rank=16, max_bytes=1 << 20)
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def rejection(folder: Path, limits: AdapterLimits = LIMITS) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        accept(folder, limits)
    return caught.value


def accept(folder: Path, limits: AdapterLimits) -> None:
    write_blob(folder, folder / "blob")
    check_values(folder / "blob", read_spec(folder / "blob", SHAPE, limits), "float32")


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_a_pickle_is_never_opened(folder, name):
    (folder / "adapter_model.safetensors").rename(folder / name)
    error = rejection(folder)
    assert error.field == name
    assert "safe_serialization=True" in error.message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert rejection(folder).field == name


@pytest.mark.parametrize("kept", [0, 7, 9, 100, -1])
def test_a_truncated_file_is_refused(folder, kept):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    error = rejection(folder)
    assert "truncated" in error.message
    assert not (folder / "blob").exists()


def test_a_header_over_the_cap_is_refused_before_it_is_parsed(tmp_path):
    path = raw_file(tmp_path / "blob", b"{" * (MAX_HEADER_BYTES + 1))
    with pytest.raises(AdapterRejected, match=r"1000001 bytes: the limit is 1000000"):
        read_spec(path, SHAPE, AdapterLimits(16, 1 << 30))


F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"[" * 100_000, "not valid JSON"),
        (b'{"x": NaN}', "not valid JSON"),
        (b'{"x": 1, "x": 2}', "twice"),
        (b"\xff\xfe\xfa{}", "not valid JSON"),
        (b"[]      ", "not a JSON object"),
        ({"x": 5}, "exactly dtype"),
        ({"x": {**F4, "more": 1}}, "exactly dtype"),
        ({"x": {**F4, "dtype": "F64"}}, "convert it"),
        ({"x": {**F4, "dtype": ["F32"]}}, "convert it"),
        ({"x": {**F4, "shape": [-1]}}, "integers"),
        ({"x": {**F4, "shape": [True]}}, "integers"),
        ({"x": {**F4, "shape": [2**60, 2**60]}}, "integers"),
        ({"x": {**F4, "data_offsets": [0]}}, "integers"),
        ({"x": {**F4, "shape": [2]}}, "want 8"),
        ({"x": F4, "y": F4}, "overlaps"),
        ({"x": {**F4, "data_offsets": [4, 8]}}, "hole"),
        ({"x": {**F4, "shape": [4], "data_offsets": [0, 16]}}, "truncated"),
        ({"__metadata__": {"lorikeet": 3}}, "__metadata__"),
        ({"__metadata__": []}, "__metadata__"),
        ({}, "after the last tensor"),
    ],
)
def test_a_malformed_header_is_refused(header, reason, tmp_path):
    with pytest.raises(AdapterRejected, match=reason):
        read_spec(raw_file(tmp_path / "blob", header, b"\0" * 8), SHAPE, LIMITS)


def test_a_plain_safetensors_file_is_not_a_blob(folder):
    with pytest.raises(AdapterRejected, match="write_blob"):
        read_spec(folder / "adapter_model.safetensors", SHAPE, LIMITS)


def test_a_blob_over_the_size_limit_is_too_large(folder):
    write_blob(folder, folder / "blob")
    with pytest.raises(AdapterTooLarge) as caught:
        read_spec(folder / "blob", SHAPE, AdapterLimits(max_rank=16, max_bytes=100))
    assert caught.value.max_bytes == 100


def test_a_rank_over_the_limit_is_too_large(folder):
    write_blob(folder, folder / "blob")
    with pytest.raises(AdapterTooLarge) as caught:
        read_spec(folder / "blob", SHAPE, AdapterLimits(max_rank=3, max_bytes=1 << 20))
    assert (caught.value.rank, caught.value.max_rank) == (4, 3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"peft_type": None}, "peft_type"),
        (
            {"use_dora": True},
            "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        ),
        ({"bias": "some"}, "bias"),
        ({"lora_bias": True}, "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config"),
        ({"alora_invocation_tokens": [1, -1]}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": "<check>"}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1] * 257}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1, 1 << 20]}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1], "target_parameters": ["mlp.up"]}, "target_parameters"),
        ({"use_a_method_of_next_year": True}, "use_a_method_of_next_year"),
        ({"r": 8}, "model.layers.0.self_attn.q_proj"),
        ({"r": 0}, "r"),
        ({"r": "4"}, "r"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"rank_pattern": {"q_proj": 2}}, "model.layers.0.self_attn.q_proj"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern"),
        ({"alpha_pattern": [3]}, "alpha_pattern"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "target_modules"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "target_modules"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_key(changes, field, folder):
    edit_config(folder, **changes)
    error = rejection(folder)
    assert error.field == field


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "other half"),
        ("base_model.model.lm_head.lora_embedding_A", "only embed_tokens can have such weights"),
        (
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            "trained tokens",
        ),
        ("base_model.model.model.norm.modules_to_save.weight", "modules_to_save"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "does not say so"),
        ("base_model.model.model.layers.0.mlp.up_proj.bias", "does not say so"),
        ("base_model.model.model.layers.0.input_layernorm.bias", "cannot be adapted"),
        ("base_model.model.lm_head.bias", "lm_head cannot have a trained bias"),
        ("base_model.model.model.layers.0.mlp.experts.up_proj.bias", "cannot have a trained bias"),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight", "own weights"),
        ("encoder.weight", "not part of a LoRA"),
        ("base_model.model.speech_encoder.layers.0.self_attn.q_proj.lora_A.weight", "other half"),
        (Q0.replace(".lora_A.", ".lora_A.default."), "two tensors"),
        (Q0.replace("q_proj", "k_proj"), "other half"),
    ],
)
def test_an_unexpected_tensor_is_refused_by_name(name, reason, folder):
    edit_weights(folder, lambda t: t.update({name: np.zeros((4, 32), np.float32)}))
    assert reason in rejection(folder).message


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("model.layers.2.self_attn.q_proj", "2 layers"),
        ("model.layers.00.self_attn.q_proj", "cannot be adapted"),
        ("model.layers.0.mlp.q_proj", "cannot be adapted"),
        ("model.layers.0.self_attn.z_proj", "cannot be adapted"),
        ("lm_head", "32 to 32 and the base model's 32 to 64"),
        ("model.layers.0.self_attn.k_proj", "32 to 32 and the base model's 32 to 16"),
    ],
)
def test_a_module_that_the_base_model_lacks_is_refused_by_name(module, reason, folder):
    extra = {f"base_model.model.{module}.lora_A.weight": np.zeros((4, 32), np.float32)}
    extra[f"base_model.model.{module}.lora_B.weight"] = np.zeros((32, 4), np.float32)
    edit_weights(folder, lambda t: t.update(extra))
    edit_config(folder, target_modules=None)
    error = rejection(folder)
    assert error.field == module
    assert reason in error.message


@pytest.mark.parametrize("shape", [(0, 32), (4,), (4, 32, 1), (5, 32)])
def test_a_and_b_that_do_not_fit_each_other_are_refused(shape, folder):
    edit_weights(folder, lambda t: t.update({Q0: np.zeros(shape, np.float32)}))
    assert rejection(folder).field == "model.layers.0.self_attn.q_proj"


def test_a_file_without_any_lora_weight_is_refused(folder):
    edit_weights(folder, lambda t: t.clear())
    assert "no LoRA weights" in rejection(folder).message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_values_that_are_not_finite_are_refused_by_tensor(value, dtype, folder):
    def spoil(tensors):
        tensors.update({name: t.astype(dtype) for name, t in tensors.items()})
        tensors[Q0.replace("lora_A", "lora_B")][31, 3] = value

    edit_weights(folder, spoil)
    assert rejection(folder).field == "layers.0.q_proj.lora_B"


def test_bfloat16_values_that_are_not_finite_are_found(folder):
    path = folder / "adapter_model.safetensors"
    tensors = {n: t.bfloat16() for n, t in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file(tensors, path)
    write_blob(folder, folder / "blob")
    check_values(folder / "blob", read_spec(folder / "blob", SHAPE, LIMITS), "bfloat16")
    tensors[Q0][0, 0] = torch.nan
    safetensors.torch.save_file(tensors, path)
    assert rejection(folder).field == "layers.0.q_proj.lora_A"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"model.layers.1.mlp.up_proj": 4}}, "model.layers.1.mlp.up_proj"),
        ({"r": True}, "r"),
        ({"peft_type": "IA3"}, "peft_type"),
    ],
)
def test_a_blob_made_by_hand_is_checked_like_any_other(change, field, folder):
    write_blob(folder, folder / "blob")
    data = (folder / "blob").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    config = json.loads(header["__metadata__"]["lorikeet"]) | change
    header["__metadata__"]["lorikeet"] = json.dumps(config)
    raw_file(folder / "blob", header, data[8 + length :])
    with pytest.raises(AdapterRejected) as caught:
        read_spec(folder / "blob", SHAPE, LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (peft.LoraConfig(modules_to_save=["norm"], target_modules=["q_proj"]), "whole modules"),
        (
            peft.LoraConfig(layer_replication=[[0, 2], [1, 2]], target_modules=["q_proj"]),
            "base model",
        ),
        (peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "only LORA"),
        (peft.LoHaConfig(target_modules=["q_proj"]), "only LORA"),
        (peft.LoKrConfig(target_modules=["q_proj"]), "only LORA"),
        (peft.VeraConfig(target_modules=["q_proj"], r=4), "only LORA"),
        (peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9), "only LORA"),
        (peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "only LORA"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_peft_can_train_and_no_engine_serves_are_refused_by_name(
    config, says, tmp_path
):
    model = LlamaForCausalLM(copy.deepcopy(CONFIG))  # PEFT writes into it
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    with pytest.raises(AdapterRejected, match=says):
        accept(tmp_path, LIMITS)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_are_refused_for_a_base_model_without_them(bias, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**CONFIG.to_dict() | {"attention_bias": True}))
    config = peft.LoraConfig(bias=bias, target_modules=["q_proj"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    error = rejection(tmp_path)
    assert error.field in (f"model.layers.0.self_attn.{name}_proj" for name in "qk")
    assert "the base model has none there" in error.message


def test_an_unknown_option_is_refused_with_the_remedy_for_a_note(folder):
    edit_config(folder, notes_of_a_trainer={"loss": 0.5})
    assert "remove it from adapter_config.json" in rejection(folder).message


def test_an_adapter_of_a_vision_part_alone_is_refused(folder):
    def move(tensors):
        for name in list(tensors):
            tensors[name.replace("model.layers", "model.vision_tower.layers")] = tensors.pop(name)

    edit_weights(folder, move)
    assert "vision part of the base model alone" in rejection(folder).message
