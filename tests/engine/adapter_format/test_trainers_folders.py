"""Folders of other trainers: other files, names and dtypes give the same adapter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from lorikeet_engine.adapter_format import AdapterLimits, read_spec, write_blob
from lorikeet_engine.errors import AdapterRejected
from tests.engine.adapter_format.peft_folder import edit_config, edit_weights
from tests.engine.tiny_llama import SHAPE, trained

WEIGHTS = "adapter_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def digest(folder: Path) -> str:
    return write_blob(folder, folder / "blob")


def rename(folder: Path, change: Callable[[str], str]) -> None:
    tensors = load_torch(folder / WEIGHTS)
    save_torch({change(name): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)


def cut(folder: Path, shards: int = 2) -> dict[str, str]:
    """Spread the weights over files with an index; return each tensor's file."""
    tensors = load_torch(folder / WEIGHTS)
    places = {}
    for number in range(shards):
        file = f"adapter_model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_torch(part, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: f"base_model.model._orig_mod.{name.removeprefix('base_model.model.')}",
        lambda name: name.replace(".self_attn.", "._orig_mod.self_attn."),
        lambda name: name.replace(".self_attn.", "._fsdp_wrapped_module.self_attn."),
        lambda name: name.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."),
        lambda name: name.replace(".weight", ".my-adapter.weight"),
        lambda name: name.replace(".model.layers.", ".model.language_model.layers."),
        lambda name: name.replace(".model.layers.", ".language_model.model.layers."),
        lambda name: name.replace(".model.layers.", ".layers."),
    ],
    ids=[
        *(
            "bare",
            "ddp",
            "compiled ddp",
            "compiled",
            "layers compiled",
            "fsdp",
            "checkpointed",
            "named",
        ),
        *("vlm", "older vlm", "headless"),
    ],
)
def test_a_tensor_under_a_variant_of_its_name_is_accepted(
    folder: Path, change: Callable[[str], str]
) -> None:
    want = digest(folder)
    rename(folder, change)
    assert digest(folder) == want


def test_a_configs_expressions_match_the_saved_names(tmp_path: Path) -> None:
    linears = r"(?:self_attn\.(?:q_proj|v_proj)|mlp\.up_proj)"
    options = {"r": 4, "rank_pattern": {r"layers\.0\..*\.q_proj": 2}, "alpha_pattern": {}}
    plain = trained(**options, target_modules=rf"model\.layers\.\d+\.{linears}")
    plain.save_pretrained(tmp_path)
    want = digest(tmp_path)
    rename(tmp_path, lambda name: name.replace(".model.layers.", ".model.language_model.layers."))
    edit_config(
        tmp_path,
        target_modules=rf"(?:.*?(?:vision|language).*?{linears})",
        rank_pattern={r"language_model\.layers\.0\..*\.q_proj": 2},
    )
    assert digest(tmp_path) == want
    edit_config(tmp_path, target_modules=rf"(?:.*?vision.*?{linears})")
    with pytest.raises(AdapterRejected, match="which it leaves out"):
        digest(tmp_path)


def test_layers_are_counted_under_their_saved_name(tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj"], "layers_to_transform": [1]}
    trained(r=4, **options, layers_pattern="layers").save_pretrained(tmp_path)
    want = digest(tmp_path)
    rename(tmp_path, lambda name: name.replace(".model.layers.", ".language_model.model.layers."))
    edit_config(tmp_path, layers_pattern="language_model.model.layers")
    assert digest(tmp_path) == want


@pytest.mark.parametrize(
    "other",
    ["base_model.model.model.language_model.layers.1", "base_model.model.layers.1"],
)
def test_layers_of_two_models_are_refused(folder: Path, other: str) -> None:
    rename(folder, lambda name: name.replace("base_model.model.model.layers.1", other))
    with pytest.raises(AdapterRejected, match="want those of one model"):
        digest(folder)


def test_two_adapters_in_one_file_are_refused(folder: Path) -> None:
    edit_weights(
        folder,
        lambda t: t.update({n.replace(".weight", ".second.weight"): v for n, v in t.items()}),
    )
    with pytest.raises(AdapterRejected, match="two tensors are lora_A"):
        digest(folder)


@pytest.mark.parametrize(
    "harmless",
    [
        {"unsloth_version": "2026.11.2"},
        {"finetuning_type": "lora"},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"unsloth_training_method": "qlora"},
        {"unsloth_note_of_next_year": [1]},
        {"swift_type": "LORA", "lora_dtype": "bfloat16", "lorap_lr_ratio": 16.0},
        {"nvfp4_merge_aware": {"scale_mode": "fresh"}},
        {"_from_model_config": True},
        {"fan_in_fan_out": True},
        {"bias": None},
        {"bias": "lora_only"},
        {"modules_to_save": ["visual.merger", "multi_modal_projector"]},
    ],
    ids=lambda harmless: next(iter(harmless)),
)
def test_options_without_effect_change_nothing(folder: Path, harmless: dict[str, object]) -> None:
    want = digest(folder)
    edit_config(folder, **harmless)
    assert digest(folder) == want


@pytest.mark.parametrize(
    "vision",
    [
        "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_{}.weight",
        "base_model.model.visual.blocks.0.attn.qkv.lora_{}.weight",
        "module.base_model.model.model.multi_modal_projector.linear_1.lora_{}.default.weight",
        "base_model.model.model.visual.merger.mlp.0.{}.bias",
    ],
)
def test_tensors_of_a_vision_part_are_left_out_with_a_warning(folder: Path, vision: str) -> None:
    want, warnings = digest(folder), list[str]()
    seen = {vision.format(side): np.ones((3, 5), np.float32) for side in "AB"}
    edit_weights(folder, lambda tensors: tensors.update(seen))
    edit_config(folder, bias="all", target_modules=["q_proj", "v_proj", "qkv", "linear_1"])
    assert write_blob(folder, folder / "blob", warnings.append) == want
    assert [said.partition(",")[0] for said in warnings] == [
        "2 tensors of the vision part are left out"
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"velora_config": peft.VeloraConfig(num_groups=4)},
        {"monteclora_config": peft.MontecloraConfig()},
    ],
    ids=str,
)
def test_a_training_methods_state_is_left_out(options: dict[str, Any], tmp_path: Path) -> None:
    trained(r=4, target_modules=["q_proj"], **options).save_pretrained(tmp_path)
    state = [n for n in load_file(tmp_path / WEIGHTS) if "velora" in n or "monteclora" in n]
    assert state
    made = digest(tmp_path)
    edit_weights(tmp_path, lambda tensors: [tensors.pop(name) for name in state])
    assert digest(tmp_path) == made


def test_weights_in_shards_are_the_same_adapter(folder: Path) -> None:
    want = digest(folder)
    cut(folder, shards=3)
    assert digest(folder) == want


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "adapter_model-00002-of-00002.safetensors").unlink(), "has no"),
        (lambda folder: (folder / INDEX).write_text('{"weight_map": ["a"]}'), "no weight_map"),
        (lambda folder: (folder / INDEX).write_text("{"), "not valid JSON"),
        (
            lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "../x.safetensors"}}'),
            "want a safetensors file beside it",
        ),
        (
            lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "weights.bin"}}'),
            "want a safetensors file beside it",
        ),
        (
            lambda folder: (folder / "adapter_model-00002-of-00002.safetensors").write_bytes(
                (folder / "adapter_model-00001-of-00002.safetensors").read_bytes()
            ),
            "is in adapter_model-00001",
        ),
    ],
    ids=["missing", "no map", "no json", "outside", "pickle", "twice"],
)
def test_shards_that_cannot_be_read_are_refused(
    folder: Path, spoil: Callable[[Path], object], says: str
) -> None:
    cut(folder)
    spoil(folder)
    with pytest.raises(AdapterRejected, match=says):
        digest(folder)


def test_float64_becomes_float32(folder: Path) -> None:
    want = digest(folder)
    edit_weights(folder, lambda t: t.update({n: v.astype(np.float64) for n, v in t.items()}))
    assert digest(folder) == want
    edit_weights(folder, lambda t: t.update({n: v * 1e300 for n, v in t.items()}))
    with pytest.raises(AdapterRejected, match="float32 cannot hold"):
        digest(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_float8_becomes_the_same_bfloat16(folder: Path, dtype: torch.dtype) -> None:
    tensors = load_torch(folder / WEIGHTS)
    codes = torch.arange(256, dtype=torch.uint8)
    for name, tensor in tensors.items():
        tensors[name] = (
            codes.repeat(tensor.numel())[: tensor.numel()].view(dtype).view(tensor.shape)
        )
    save_torch(tensors, folder / WEIGHTS)
    digest(folder)
    for name, got in load_torch(folder / "blob").items():
        assert got.dtype == torch.bfloat16
        want = tensors[name].to(torch.bfloat16)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(got), torch.signbit(want))


def test_a_float8_adapter_is_accepted(folder: Path) -> None:
    tensors = load_torch(folder / WEIGHTS)
    save_torch({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items()}, folder / WEIGHTS)
    digest(folder)
    spec = read_spec(folder / "blob", SHAPE, AdapterLimits(max_rank=16, max_bytes=1 << 20))
    assert {part.a.dtype for part in spec.linears} == {"BF16"}


def test_the_blob_equals_the_plain_folders_blob(folder: Path) -> None:
    rename(folder, lambda name: f"module._orig_mod.{name}")
    digest(folder)
    assert all(
        name.startswith("base_model.model.model.layers.") for name in load_file(folder / "blob")
    )
