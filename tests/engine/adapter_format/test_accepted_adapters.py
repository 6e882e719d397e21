"""A blob is what PEFT saved: same matrices, same scaling, one digest."""

from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import LlamaForCausalLM

from lorikeet_engine.adapter_format import (
    AdapterLimits,
    LinearLora,
    blob_digest,
    check_values,
    read_spec,
    write_blob,
)
from lorikeet_engine.errors import AdapterRejected
from tests.engine.adapter_format.peft_folder import edit_config, edit_weights
from tests.engine.tiny_llama import CONFIG, LINEARS, SHAPE, trained

LIMITS = AdapterLimits(max_rank=16, max_bytes=1 << 20)
PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def delta(part: LinearLora, data: bytes) -> np.ndarray:
    """scaling · B A, from a float32 blob's bytes."""
    a, b = (
        np.frombuffer(data[span.begin : span.end], np.float32).reshape(span.shape)
        for span in (part.a, part.b)
    )
    return part.scaling * (b @ a)


@pytest.mark.parametrize(
    "options",
    [
        {"r": 4},
        {"r": 6, "use_rslora": True},
        {"target_modules": "all-linear"},
        {"target_modules": LINEARS, "layers_to_transform": [1]},
        {"target_modules": LINEARS, "layers_to_transform": 0, "layers_pattern": "layers"},
        {"target_modules": "all-linear", "exclude_modules": ["k_proj", "0.mlp.up_proj"]},
        {"target_modules": "all-linear", "exclude_modules": r".*\.0\.mlp\..*|lm_head"},
        {"target_modules": ["1.self_attn.q_proj", "model.layers.0.mlp.down_proj"]},
        {
            "target_modules": ["model.layers.0.self_attn.q_proj", "v_proj"],
            "layers_to_transform": [1],
        },
        {"target_modules": r".*\.(gate|up|down)_proj"},
        {"target_modules": r"model\.layers\.\d+\.(?:self_attn|mlp)\.(?:q_proj|up_proj)"},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {
            "rank_pattern": {r"layers\.1\..*q_proj": 2, "v_proj": 3},
            "alpha_pattern": {"v_proj": 7, r"model.layers.\d+.self_attn.q_proj": 5},
        },
        # PEFT takes the first key that matches, not the longest.
        {"rank_pattern": {".*v_proj": 5, "[qv]_proj": 2, "v_proj": 7}},
        {"rank_pattern": {r"layers.0.self_attn.v_proj": 1}, "use_rslora": True},
        {"target_modules": ["lm_head"]},
        {"target_modules": r".*\.q_proj|lm_head", "rank_pattern": {"lm_head": 9}},
        {"target_modules": ["down_proj", "lm_head"], "alpha_pattern": {"lm_head": 3}},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_rslora": True},
        {
            "target_modules": ["q_proj", "lm_head", "embed_tokens", "model.layers.0.mlp.up_proj"],
            "layers_to_transform": [1],
        },
        {"target_modules": r".*embed_tokens", "rank_pattern": {"embed_tokens": 3}},
    ],
)
def test_rank_scaling_and_delta_of_every_module_equal_pefts(options, tmp_path):
    model = trained(**PLAIN | options)
    model.save_pretrained(tmp_path)
    write_blob(tmp_path, tmp_path / "blob")
    spec = read_spec(tmp_path / "blob", SHAPE, LIMITS)
    data = (tmp_path / "blob").read_bytes()
    got = {(part.layer, part.linear): (part.rank, part.scaling) for part in spec.linears}
    deltas = {(part.layer, part.linear): delta(part, data) for part in spec.linears}
    want = {}
    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            path = name.split(".")
            layer = int(path[path.index("layers") + 1]) if "layers" in path else SHAPE.outer_layer
            key = layer, SHAPE.index(path[-1])
            want[key] = module.r["default"], pytest.approx(module.scaling["default"])
            whole = module.get_delta_weight("default").detach().numpy()
            whole = whole.T if path[-1] == "embed_tokens" else whole
            np.testing.assert_allclose(deltas[key], whole, rtol=1e-5, atol=1e-5)
    assert got == want
    assert list(got) == sorted(got)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_began_as_part_of_the_base_model_is_served_once_it_is_whole(init, tmp_path):
    options = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "init_lora_weights": init}
    torch.manual_seed(0)
    base = LlamaForCausalLM(CONFIG)
    first = {n: w.detach().clone() for n, w in base.named_parameters() if "q_proj" in n}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    model.peft_config["default"].init_lora_weights = True  # as PEFT's documentation has it
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = init
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data += torch.randn_like(weight) / 4
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(AdapterRejected, match="path_initial_model_for_weight_conversion"):
        write_blob(tmp_path / "bare", tmp_path / "blob")
    model.save_pretrained(
        tmp_path / "whole", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    write_blob(tmp_path / "whole", tmp_path / "blob")
    spec = read_spec(tmp_path / "blob", SHAPE, LIMITS)
    data = (tmp_path / "blob").read_bytes()
    merged = model.merge_and_unload().state_dict()
    for part in spec.linears:
        name = f"model.layers.{part.layer}.self_attn.q_proj.weight"
        want = merged[name] - first[name]
        np.testing.assert_allclose(delta(part, data), want.numpy(), rtol=1e-4, atol=1e-4)


def test_the_spans_of_a_spec_hold_the_tensors_bytes(folder):
    write_blob(folder, folder / "blob")
    spec = read_spec(folder / "blob", SHAPE, LIMITS)
    tensors = load_file(folder / "adapter_model.safetensors")
    data = (folder / "blob").read_bytes()
    assert len(spec.linears) == 4
    for part in spec.linears:
        for side, span in (("A", part.a), ("B", part.b)):
            linear = SHAPE.modules[part.linear].path(part.layer)
            want = tensors[f"base_model.model.{linear}.lora_{side}.weight"]
            got = np.frombuffer(data[span.begin : span.end], np.float32).reshape(span.shape)
            assert np.array_equal(got, want)
    assert spec.packed_elements(SHAPE.dims) == 2 * (4 * (32 + 32) + 4 * (32 + 16))


def test_the_same_adapter_has_the_same_digest_however_it_was_saved(folder):
    first = write_blob(folder, folder / "one")
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {n.replace(".weight", ".default.weight"): t for n, t in reversed(tensors.items())}
    save_file(renamed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    edit_config(folder, lora_dropout=0.5, peft_version="0.0.1", lora_alpha=8.0)
    assert write_blob(folder, folder / "two") == first == blob_digest(folder / "two")
    edit_config(folder, lora_alpha=9)
    assert write_blob(folder, folder / "three") != first


def test_a_blob_is_readable_by_the_safetensors_library(folder):
    write_blob(folder, folder / "blob.safetensors")
    want = load_file(folder / "adapter_model.safetensors")
    got = load_file(folder / "blob.safetensors")
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name], want[name]) for name in want)


def test_half_precision_weights_are_accepted(folder):
    edit_weights(folder, lambda t: t.update({n: v.astype(np.float16) for n, v in t.items()}))
    write_blob(folder, folder / "blob")
    spec = read_spec(folder / "blob", SHAPE, LIMITS)
    check_values(folder / "blob", spec, "float16")
    assert {part.a.dtype for part in spec.linears} == {"F16"}
