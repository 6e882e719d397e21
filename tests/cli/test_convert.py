"""A converted adapter changes the base model's weights as the original does, by PEFT's merge."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from typer.testing import CliRunner, Result

from lorikeet.cli import app
from lorikeet_engine.adapter_format import WEIGHTS_FILE, write_blob
from lorikeet_engine.errors import AdapterRejected
from tests.engine.tiny_llama import CONFIG, LINEARS, trained

PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS}
MIXED: dict[str, Any] = PLAIN | {
    "use_rslora": True,
    "rank_pattern": {r"layers\.1\..*q_proj": 2, "down_proj": 7},
    "alpha_pattern": {"up_proj": 3},
    "target_modules": r".*layers\.1\.self_attn\.(q|k)_proj|.*mlp\..*_proj",
}
TRTLLM_IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "up_proj": 7}
TRTLLM_IDS["down_proj"] = 6
WEIGHTS, CONFIGURED = "model.lora_weights.npy", "model.lora_config.npy"


def deltas(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the delta that PEFT adds to each weight of the base model."""
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").float()
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def deltas_of(folder: Path) -> dict[str, torch.Tensor]:
    return deltas(peft.PeftModel.from_pretrained(LlamaForCausalLM(CONFIG), folder))


def convert(*arguments: object) -> Result:
    environment = {"COLUMNS": "300", "LORIKEET_ADMIN_KEY": "", "LORIKEET_SERVER": ""}
    return CliRunner().invoke(app, ["convert", *map(str, arguments)], env=environment)


def converted(source: Path, out: Path, *options: object) -> Path:
    result = convert(source, out, *options)
    assert result.exit_code == 0, result.stderr
    return out


def refusal(source: Path, out: Path, *options: object) -> str:
    result = convert(source, out, *options)
    assert result.exit_code == 1, result.output
    assert not out.exists()
    return " ".join(result.stderr.split())


# adapter_model.bin.


def save_pickle(folder: Path, tensors: Any, **config: Any) -> Path:
    """Write a folder as PEFT did before safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "adapter_model.bin")
    peft.LoraConfig(**(PLAIN | config)).save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [PLAIN, MIXED])
def test_a_converted_pickle_equals_the_safetensors_that_peft_would_write(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = trained(**options)
    state = {n: t.to(dtype) for n, t in peft.get_peft_model_state_dict(model).items()}
    save_pickle(tmp_path / "old", state, **options)
    out = converted(tmp_path / "old", tmp_path / "new")
    model.to(dtype).save_pretrained(tmp_path / "modern")
    digests = {write_blob(tmp_path / name, tmp_path / "blob") for name in ("new", "modern")}
    assert len(digests) == 1
    got, want = deltas_of(out), deltas_of(tmp_path / "modern")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


SHARDS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
STATE = ("optimizer.pt", "rng_state_0.pth", "scheduler.pt", "training_args.bin")


@pytest.mark.parametrize(
    "names",
    [
        ("pytorch_model.bin",),
        ("adapter_model.pt",),
        ("epoch_3.pth",),
        ("adapter_model-00001-of-00001.bin",),
        SHARDS,
    ],
    ids=lambda names: names[0],
)
def test_convert_takes_each_pickle_for_which_register_names_convert(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    model, old = trained(**PLAIN), tmp_path / "old"
    state = peft.get_peft_model_state_dict(model)
    save_pickle(old, state)
    (old / "adapter_model.bin").unlink()
    for number, name in enumerate(names):
        torch.save(dict(list(state.items())[number :: len(names)]), old / name)
    for name in STATE:  # of a checkpoint's trainer
        (old / name).write_bytes(b"x")
    with pytest.raises(AdapterRejected, match=rf"{names[0]} is a pickle.*lorikeet convert"):
        write_blob(old, tmp_path / "blob")
    model.save_pretrained(tmp_path / "modern")
    digests = {
        write_blob(folder, tmp_path / "blob")
        for folder in (converted(old, tmp_path / "new"), tmp_path / "modern")
    }
    assert len(digests) == 1


def test_a_trainers_state_alone_is_no_adapter(folder_of_state: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterRejected, match=r"has no adapter_model\.safetensors"):
        write_blob(folder_of_state, tmp_path / "blob")
    assert "has neither an adapter_model.bin" in refusal(folder_of_state, tmp_path / "new")


@pytest.fixture
def folder_of_state(tmp_path: Path) -> Path:
    """Folder with a config and a trainer's state, without weights."""
    save_pickle(tmp_path / "old", {})
    (tmp_path / "old/adapter_model.bin").unlink()
    for name in STATE:
        (tmp_path / "old" / name).write_bytes(b"x")
    return tmp_path / "old"


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_whole_models_state_dict_gives_its_adapter_alone(prefix: str, tmp_path: Path) -> None:
    model = trained(**PLAIN)
    whole = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    assert any(".base_layer." in name for name in whole)
    save_pickle(tmp_path / "old", whole)
    (tmp_path / "old/adapter_model.bin").rename(tmp_path / "old/pytorch_model.bin")
    model.save_pretrained(tmp_path / "modern")
    digests = {
        write_blob(folder, tmp_path / "blob")
        for folder in (converted(tmp_path / "old", tmp_path / "new"), tmp_path / "modern")
    }
    assert len(digests) == 1


def test_trained_biases_in_a_whole_models_state_dict_are_not_lost(tmp_path: Path) -> None:
    whole = trained(**PLAIN).state_dict()
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"
    save_pickle(tmp_path / "old", whole | {name: torch.ones(32)}, bias="all")
    (tmp_path / "old/adapter_model.bin").rename(tmp_path / "old/pytorch_model.bin")
    weights = load_file(converted(tmp_path / "old", tmp_path / "new") / WEIGHTS_FILE)
    assert weights[name].eq(1).all()


@pytest.mark.parametrize("gone", SHARDS)
def test_a_missing_shard_of_a_pickle_is_named(gone: str, tmp_path: Path) -> None:
    save_pickle(tmp_path / "old", {})
    (tmp_path / "old/adapter_model.bin").unlink()
    for name in SHARDS:
        if name != gone:
            torch.save({}, tmp_path / "old" / name)
    assert f"has no {gone}, a shard" in refusal(tmp_path / "old", tmp_path / "new")


def test_without_torch_the_error_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pickle(tmp_path / "old", {})
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "needs torch: pip install torch" in refusal(tmp_path / "old", tmp_path / "new")


class Bomb:
    """Object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_pickle_that_would_run_code_runs_none(hidden: bool, tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "boom")
    tensors = peft.get_peft_model_state_dict(trained(**PLAIN))
    save_pickle(tmp_path / "old", tensors | {"x": bomb} if hidden else bomb)
    assert "holds more than tensors" in refusal(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    ("found", "config", "says"),
    [
        ([1, 2], {}, "is not a table of tensors by name"),
        ({"x": 3}, {}, "is not a table of tensors by name"),
        ({}, {}, "has no LoRA weights"),
        ({"x": torch.zeros(2)}, {}, "tensor x is not part of a LoRA adapter"),
        ({"x": torch.zeros(2, dtype=torch.int64)}, {}, "'x' is no tensor of float32, float16"),
        ({3: torch.eye(2).to_sparse(), "x": torch.zeros(2)}, {}, "3 is no tensor of float32"),
        (None, {"use_dora": True}, "lora_magnitude_vector is missing"),
        (None, {"r": 3}, "have rank 4 and the config says 3"),
    ],
)
def test_a_pickle_without_an_adapter_is_refused(
    found: Any, config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    tensors = peft.get_peft_model_state_dict(trained(**PLAIN)) if found is None else found
    save_pickle(tmp_path / "old", tensors, **config)
    assert says in refusal(tmp_path / "old", tmp_path / "new")


def test_a_damaged_pickle_is_refused(tmp_path: Path) -> None:
    save_pickle(tmp_path / "old", {})
    for data in (b"", b"PK\3\4", b"\x80\x04", b"<html>"):
        (tmp_path / "old/adapter_model.bin").write_bytes(data)
        assert "is damaged" in refusal(tmp_path / "old", tmp_path / "new")


def test_only_pickled_py_opens_adapters_pickles() -> None:
    root = Path(__file__).parents[2]
    opens = re.compile(r"torch\.load\(|pickle\.loads?\(|allow_pickle=True")
    found = {
        str(path.relative_to(root))
        for folder in ("platform", "engine/lorikeet_engine", "demo")
        for path in (root / folder).rglob("*.py")
        if opens.search(path.read_text())
    }
    # Pipes and a ring carry objects between a replica and the processes that it started.
    ours = ("process/server", "process/wire", "process/follower")
    assert found - {f"engine/lorikeet_engine/{name}.py" for name in ours} == {
        "platform/lorikeet/cli/adapters/pickled.py"
    }


# TensorRT-LLM's pair.


def module_of(name: str) -> tuple[int, str]:
    path = name.split(".")
    return int(path[path.index("layers") + 1]), path[-1]


def save_pair(folder: Path, rows: list[tuple[int, int, Any, Any]], dtype: str = "<f4") -> Path:
    """Rows of (module id, layer, A, B) as TensorRT-LLM's converter lays them out."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = [np.concatenate([a.numpy().ravel(), b.numpy().ravel()]) for _, _, a, b in rows]
    size = max(map(len, flat))
    weights = np.stack([np.pad(row, (0, size - len(row))) for row in flat])[None]
    if dtype == "|V2":  # what numpy makes of its bfloat16
        stored = torch.from_numpy(weights).bfloat16().view(torch.int16).numpy().view("|V2")
    else:
        stored = weights.astype(dtype)
    np.save(folder / WEIGHTS, stored)
    config = [(kind, layer, len(a)) for kind, layer, a, _ in rows]
    np.save(folder / CONFIGURED, np.array(config, np.int32)[None])
    return folder


def rows_of(model: peft.PeftModel, *, scaled: bool) -> list[tuple[int, int, Any, Any]]:
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            layer, linear = module_of(name)
            a, b = module.lora_A["default"].weight.data, module.lora_B["default"].weight.data
            scaling = module.scaling["default"] if scaled else 1.0
            rows.append((TRTLLM_IDS[linear], layer, a, b * scaling))
    return rows


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "Tiny-1B").mkdir()
    CONFIG.save_pretrained(tmp_path / "Tiny-1B")
    return tmp_path / "Tiny-1B"


@pytest.mark.parametrize(("dtype", "eps"), [("<f4", 2**-23), ("<f2", 2**-10), ("|V2", 2**-7)])
@pytest.mark.parametrize("options", [PLAIN, MIXED])
def test_a_pair_with_the_scaling_in_b_adds_pefts_delta(
    options: dict[str, Any], dtype: str, eps: float, base: Path, tmp_path: Path
) -> None:
    model = trained(**options)
    save_pair(tmp_path / "old", rows_of(model, scaled=True), dtype)
    got = deltas_of(converted(tmp_path / "old", tmp_path / "new", "--base-model", base))
    want = deltas(model)
    assert got.keys() == want.keys()
    for name in want:
        # A and B are rounded once each: rank products, each off by 2 eps of its size at most.
        a_b = want[name].abs().max().item()
        assert (got[name] - want[name]).abs().max().item() <= 4 * eps * max(a_b, 8.0), name
    config = json.loads((tmp_path / "new/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "Tiny-1B"


def test_a_given_alpha_is_applied_once(base: Path, tmp_path: Path) -> None:
    model = trained(**PLAIN | {"rank_pattern": {"o_proj": 2}})
    save_pair(tmp_path / "old", rows_of(model, scaled=False))
    out = converted(tmp_path / "old", tmp_path / "new", "--base-model", base, "--alpha", "8")
    got, want = deltas_of(out), deltas(model)
    assert all(torch.allclose(got[name], want[name], rtol=1e-6, atol=0) for name in want)


def test_a_fused_qkv_is_split(base: Path, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    a, b = torch.randn(3, 32, generator=draw), torch.randn(32 + 16 + 16, 3, generator=draw)
    save_pair(tmp_path / "old", [(0, 1, a, b)])
    config = base / "config.json"
    got = deltas_of(converted(tmp_path / "old", tmp_path / "new", "--base-model", config))
    assert set(got) == {f"model.layers.1.self_attn.{side}_proj" for side in "qkv"}
    whole = torch.cat([got[f"model.layers.1.self_attn.{side}_proj"] for side in "qkv"])
    assert torch.allclose(whole, b @ a, rtol=1e-5, atol=1e-5)


def zeros(rank: int, d_in: int, d_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rank, d_in), torch.ones(d_out, rank)


Q_ROW = (1, 0, *zeros(2, 32, 32))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(8, 0, *zeros(2, 32, 32))], "row 0 has the module id 8: cross-attention"),
        ([Q_ROW, (12, 0, *zeros(2, 32, 32))], "row 1 has the module id 12: cross-attention"),
        ([(13, 0, *zeros(2, 32, 32))], "experts or their router"),
        ([(99, 0, *zeros(2, 32, 32))], "module id 99: no module that is known"),
        ([(-1, 0, *zeros(2, 32, 32))], "module id -1: no module that is known"),
        ([(1, 2, *zeros(2, 32, 32))], "row 0 is for layer 2 of 2 at rank 2"),
        ([(1, -1, *zeros(2, 32, 32))], "row 0 is for layer -1"),
        ([(1, 0, *zeros(0, 32, 32)), Q_ROW], "at rank 0"),
        ([(1, 0, *zeros(2, 32, 64))], "row 0 is not the 128 values of rank 2 from 32 to 32"),
        ([(1, 0, *zeros(2, 16, 16))], "row 0 is not the 128 values"),
        ([Q_ROW, Q_ROW], "row 1 is for model.layers.0.self_attn.q_proj, and so is one before"),
        ([(0, 0, *zeros(2, 32, 64)), Q_ROW], "row 1 is for model.layers.0.self_attn.q_proj"),
    ],
)
def test_a_row_for_a_module_that_the_base_model_lacks_is_refused(
    rows: list[Any], says: str, base: Path, tmp_path: Path
) -> None:
    save_pair(tmp_path / "old", rows)
    assert says in refusal(tmp_path / "old", tmp_path / "new", "--base-model", base)


def test_a_row_of_a_dense_mlp_is_not_for_all_experts_of_a_mixture(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    config = {"model_type": "mixtral", "num_attention_heads": 4, "num_local_experts": 4, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_pair(tmp_path / "old", [(TRTLLM_IDS["gate_proj"], 0, *zeros(2, 32, 64))])
    said = refusal(tmp_path / "old", tmp_path / "new", "--base-model", tmp_path / "config.json")
    assert "row 0 has the module id 5: not of this base model" in said


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        (WEIGHTS, np.zeros((1, 1, 128), np.int8), "lora_weights.npy: holds int8"),
        (WEIGHTS, np.zeros((2, 1, 128), np.float32), "has the shape [2, 1, 128]"),
        (WEIGHTS, np.zeros(128, np.float32), "has the shape [128]"),
        (WEIGHTS, np.zeros((2, 128), np.float32), "a row (module id, layer, rank) for each row"),
        (WEIGHTS, np.array([[{}]], object), "cannot be read: "),
        (CONFIGURED, np.zeros((1, 1, 4), np.int32), "a row (module id, layer, rank)"),
        (CONFIGURED, np.zeros((1, 1, 3), np.float32), "a row (module id, layer, rank)"),
    ],
)
def test_a_pair_of_other_shapes_is_refused(
    name: str, array: Any, says: str, base: Path, tmp_path: Path
) -> None:
    save_pair(tmp_path / "old", [Q_ROW])
    np.save(tmp_path / "old" / name, array)
    assert says in refusal(tmp_path / "old", tmp_path / "new", "--base-model", base)


# Usage.


def test_contradictory_arguments_are_wrong_usage(base: Path, tmp_path: Path) -> None:
    pair = save_pair(tmp_path / "pair", [Q_ROW])
    old = save_pickle(tmp_path / "old", peft.get_peft_model_state_dict(trained(**PLAIN)))
    for arguments, says in (
        ((pair, tmp_path / "new"), "give --base-model"),
        ((old, base), "exists already"),
        ((old, tmp_path / "new", "--alpha", "8"), "TensorRT-LLM's tensors only"),
        ((tmp_path / "none", tmp_path / "new"), "does not exist"),
    ):
        result = convert(*arguments)
        assert result.exit_code == 2
        assert says in " ".join(result.stderr.split())


def test_a_folder_without_a_known_format_is_refused_with_the_missing_file(
    base: Path, tmp_path: Path
) -> None:
    assert "has neither an adapter_model.bin or pytorch_model.bin nor" in refusal(
        base, tmp_path / "new"
    )
    save_pickle(tmp_path / "old", {})
    (tmp_path / "old/adapter_config.json").unlink()
    assert "has no adapter_config.json" in refusal(tmp_path / "old", tmp_path / "new")
    trained(**PLAIN).save_pretrained(tmp_path / "modern")
    assert "safetensors already: register it" in refusal(tmp_path / "modern", tmp_path / "new")


def test_a_folder_without_a_base_model_is_refused(tmp_path: Path) -> None:
    pair = save_pair(tmp_path / "pair", [Q_ROW])
    said = refusal(pair, tmp_path / "new", "--base-model", pair)
    assert "config.json does not exist" in said
