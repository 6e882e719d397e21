"""A checkpoint is loaded whole and right, or refused with the name of what is wrong."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.errors import ModelError, SettingsError
from lorikeet_engine.models import checkpoint, staging, stored_tensors
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.models.rotary import QueryScaling
from tests.engine.conftest import YARN
from tests.engine.models.test_models import assert_equal, prompt_of, reference

CPU = torch.device("cpu")
CUDA = pytest.param(
    "cuda",
    marks=pytest.mark.gpu,
)


def load(folder):
    return load_model(folder, CPU, torch.float32)


def test_a_config_tells_the_engine_its_sizes(tiny_checkpoints):
    config = ModelConfig.from_folder(tiny_checkpoints["qwen3"])
    shape = config.shape
    assert (config.vocab_size, config.max_context, shape.hidden) == (256, 512, 64)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (2, 4, 2, 32)


def test_end_of_sequence_ids_come_from_both_files(edited):
    folder = edited("llama", eos_token_id=[9, 3])
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert ModelConfig.from_folder(folder).eos_token_ids == (3, 5, 9)


def test_the_older_way_to_write_rope_means_the_same(tiny_checkpoints, edited):
    new = tiny_checkpoints["llama3_rope"]
    rope = json.loads((new / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    old = edited("llama", rope_parameters=None, rope_theta=theta, rope_scaling=rope)
    want = ModelConfig.from_folder(new)
    assert ModelConfig.from_folder(old).ropes == want.ropes


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("llama", {"vocab_size": "many"}, "vocab_size"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"quantization_config": "fp8"}, "quantization_config.quant_method"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "xpos", "factor": 4.0}},
            "rope_parameters.rope_type",
        ),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "ntk", "factor": 2.0}},
            "rope_scaling.rope_type",
        ),
        (
            "qwen3",
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            "rope_scaling",
        ),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "factor"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters.full_attention",
        ),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": 1}},
            "truncate",
        ),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.878}},
            "rope_parameters.attn_factor",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("phi3", {"partial_rotary_factor": 0.2, "rope_parameters": None}, "partial_rotary_factor"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "short_factor",
        ),
        ("phi3", {"sliding_window": 0}, "sliding_window"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("olmo3", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (
            "mistral",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "rope_parameters.llama_4_scaling_beta",
        ),
        (
            "ministral3",
            {"rope_parameters": YARN | {"llama_4_scaling_beta": -0.1}},
            "llama_4_scaling_beta",
        ),
        ("ministral3", {"rope_parameters": YARN}, "rope_parameters.llama_4_scaling_beta"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "rope_parameters.original_max_position_embeddings",
        ),
    ],
)  # fmt: skip
def test_an_unsupported_value_is_refused_by_its_key(edited, family, changes, field):
    with pytest.raises(ModelError) as refused:
        load(edited(family, **changes))
    assert refused.value.field == field
    assert field.split(".")[-1] in str(refused.value)


def test_layers_have_windows_where_the_config_says_so(edited, tmp_path):
    def windows(family, max_context=None, **changes):
        shutil.rmtree(tmp_path / family, ignore_errors=True)
        changes = {"sliding_window": 64, "layer_types": None, **changes}
        return ModelConfig.from_folder(edited(family, **changes), max_context).windows

    assert windows("mistral") == windows("phi3") == windows("ministral") == (64, 64)
    assert windows("mistral", max_context=64) == (None, None), "it hides nothing there"
    assert windows("qwen2") == windows("smollm3") == (None, None)
    assert windows("qwen2", use_sliding_window=True, max_window_layers=1) == (None, 64)
    assert windows("smollm3", use_sliding_window=True) == (None, 64)
    assert windows("gemma2") == (64, None)
    assert windows("gemma3_text", sliding_window_pattern=1) == (None, None)
    assert windows("olmo3") == windows("gemma3_text", sliding_window_pattern=None) == (64, 64)


def test_yarn_has_room_for_the_context_that_it_stretches_to(edited):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    folder = edited("qwen2", rope_parameters=None, rope_theta=1e6, rope_scaling=rope)
    assert ModelConfig.from_folder(folder).max_context == 4 * 512


def test_queries_grow_only_in_a_context_where_a_position_changes_them(edited, tiny_checkpoints):
    def scaling(folder, max_context=None):
        rope, *_ = ModelConfig.from_folder(folder, max_context).ropes
        return rope.queries

    folder = tiny_checkpoints["ministral3"]
    assert scaling(folder) == scaling(folder, 9) == QueryScaling(0.5, 8)
    assert scaling(folder, 8) is None, "every position is within the original context"
    rope = YARN | {"llama_4_scaling_beta": 0}
    assert scaling(edited("ministral3", rope_parameters=rope)) is None


def test_a_refused_attn_factor_names_the_attention_factors_to_choose_from(edited):
    rope = {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419}
    with pytest.raises(ModelError, match=r"attention_factor .*: 1 as vLLM, .* or 1\.139 as trans"):
        ModelConfig.from_folder(edited("qwen3", rope_parameters=rope))


@pytest.mark.parametrize("attention_factor", [1.0, 1.139])
def test_an_attention_factor_decides_beside_an_attn_factor(edited, attention_factor):
    rope = {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.878}
    rope["attention_factor"] = attention_factor
    config = ModelConfig.from_folder(edited("qwen3", rope_parameters=rope))
    assert config.ropes[0].gain == pytest.approx(attention_factor)


def test_phi_calls_longrope_by_older_names_too(tiny_checkpoints, edited):
    new = json.loads((tiny_checkpoints["longrope"] / "config.json").read_text())
    rope = new.pop("rope_parameters")
    factors = {key: rope[key] for key in ("short_factor", "long_factor")}
    want = ModelConfig.from_folder(tiny_checkpoints["longrope"]).ropes
    for kind in ("su", "yarn"):
        old = {**new, "rope_parameters": None, "rope_scaling": {"type": kind, **factors}}
        folder = edited("phi3", **old, partial_rotary_factor=0.75, rope_theta=10_000.0)
        assert ModelConfig.from_folder(folder).ropes == want
        shutil.rmtree(folder)


def test_a_context_beyond_the_position_embeddings_is_refused(tiny_checkpoints):
    with pytest.raises(ModelError, match="max_position_embeddings"):
        ModelConfig.from_folder(tiny_checkpoints["llama"], max_context=513)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t, name: t.pop(name), "is missing"),
        (lambda t, name: t.update({name: t[name][:-1].clone()}), "want"),
        (lambda t, name: t.update({name: t[name].to(torch.int8)}), "I8"),
    ],
    ids=["missing", "misshapen", "quantised"],
)
def test_a_tensor_that_does_not_fit_is_named(edited, spoil, message):
    folder, name = edited("qwen2"), "model.layers.1.self_attn.k_proj.bias"
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors, name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message) as refused:
        load(folder)
    assert refused.value.field == name
    assert name in str(refused.value)


def test_a_tied_head_may_be_stored_if_it_is_the_embeddings(edited, monkeypatch):
    monkeypatch.setattr(stored_tensors, "STAGING_BYTES", 1000)  # so that it comes in pieces
    folder = edited("llama", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    assert load(folder).config.tied_embeddings
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, file)
    with pytest.raises(ModelError, match="tie_word_embeddings=True: want false, as the check"):
        load(folder)


def test_a_trained_head_that_the_config_ties_is_not_tied_by_transformers_either(
    tiny_checkpoints, edited
):
    prompt = prompt_of(9)
    want = reference(tiny_checkpoints["llama"], prompt)
    assert_equal(reference(edited("llama", tie_word_embeddings=True), prompt), want)


def test_tensors_that_the_config_does_not_know_are_refused(edited):
    with pytest.raises(ModelError, match=r"k_norm\.weight .* do not belong together"):
        load(edited("qwen3", model_type="llama"))


def test_a_missing_shard_is_named(tiny_checkpoints, tmp_path):
    folder = shutil.copytree(tiny_checkpoints["sharded"], tmp_path / "copy")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[-1].unlink()
    with pytest.raises(ModelError) as refused:
        load(folder)
    assert refused.value.field == shards[-1].name


def test_a_truncated_file_is_named(edited):
    folder = edited("llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="no whole safetensors file"):
        load(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_folder_without_a_file_says_which(edited, file):
    folder = edited("llama")
    (folder / file).unlink()
    with pytest.raises(ModelError, match="does not exist") as refused:
        load(folder)
    assert refused.value.field == file


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_every_dtype_come_whole_from_pieces(tmp_path, monkeypatch, device, dtype):
    monkeypatch.setattr(staging, "STAGING_BYTES", 1000)  # a piece ends within a row
    stored = {
        name: torch.randn(rows, 96).to(kind)
        for name, rows, kind in (
            ("q", 33, torch.float32), ("k", 1, torch.float16), ("v", 64, torch.bfloat16)
        )
    }  # fmt: skip
    save_file(stored, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.device(device), dtype) as checkpoint:
        fused = checkpoint.read(["q", "k", "v"], [33, 1, 64], 96)
        checkpoint.check_all_read()
    want = torch.cat([tensor.to(dtype) for tensor in stored.values()])
    assert torch.equal(fused.cpu(), want)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_host_holds_no_second_copy(tmp_path, device):
    save_file({"w": torch.ones(192 << 20, dtype=torch.uint8).view(torch.float16)[None]},
              tmp_path / "model.safetensors")  # fmt: skip
    torch.zeros(1, device=device)  # the device's own start is not counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, _ = host_bytes()
    with Checkpoint(tmp_path, torch.device(device), torch.float32) as checkpoint:
        tensor = checkpoint.read(["w"], [1], 96 << 20)
    _, peak = host_bytes()
    result = tensor.nbytes if device == "cpu" else 0
    assert tensor.sum() > 0
    assert peak - before - result < staging.READERS * staging.STAGING_BYTES + (16 << 20)


def host_bytes():
    """This process's current and peak memory, mapped files included."""
    facts = Path("/proc/self/status").read_text()
    held, peak = (int(re.search(rf"{name}:\s+(\d+)", facts)[1]) for name in ("VmRSS", "VmHWM"))
    return held << 10, peak << 10


@pytest.mark.parametrize(
    ("rounding", "remedy"),
    [
        (None, "want a smaller model, weight_dtype=fp8, or a larger device"),
        (Quantization.NF4, "want a smaller model, weight_dtype=fp8, or a larger device"),
        (Quantization.FP8, "want a smaller model, or a larger device"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    tiny_checkpoints, monkeypatch, rounding, remedy
):
    monkeypatch.setattr(checkpoint, "free_bytes", lambda device: 5000)
    monkeypatch.setattr(staging.Staging, "copy", None)
    with pytest.raises(SettingsError) as refused:
        load_model(tiny_checkpoints["llama"], CPU, torch.float32, rounding=rounding)
    assert re.search(r"weights take 0\.00 GiB .* 0\.00 GiB are free on cpu", refused.value.message)
    assert refused.value.message.endswith(remedy)


def test_a_file_cut_after_its_header_was_read_is_named(edited):
    file = edited("llama") / "model.safetensors"

    def read():
        with Checkpoint(file.parent, CPU, torch.float32) as checkpoint:
            os.truncate(file, 10_000)
            checkpoint.read(["model.embed_tokens.weight"], [256], 64)

    with pytest.raises(ModelError, match="ended early") as refused:
        read()
    assert refused.value.field == file.name
