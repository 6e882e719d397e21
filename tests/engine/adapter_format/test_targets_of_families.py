"""Targets by family: a target that the base model lacks needs no weights; any other does."""

import json
from pathlib import Path

import peft
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorikeet_engine.adapter_format import (
    AdapterLimits,
    AdapterSpec,
    BaseShape,
    read_config,
    read_spec,
    write_blob,
)
from lorikeet_engine.adapter_format.families import LayerKind
from lorikeet_engine.errors import AdapterRejected
from tests.engine.adapter_format.peft_folder import edit_config

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
USUAL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 24)
INCOMPLETE = "that have no weights: the file is incomplete"


def packed(
    checkpoint: Path, folder: Path, trained: list[str], targets: list[str] | str | None = None
) -> Path:
    """Blob of an adapter that PEFT trains.

    targets: written to its config afterwards.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=trained)).save_pretrained(folder)
    if targets is not None:
        edit_config(folder, target_modules=targets)
    write_blob(folder, folder / "blob")
    return folder / "blob"


def spec_on(checkpoint: Path, blob: Path) -> AdapterSpec:
    return read_spec(blob, BaseShape.from_config(read_config(checkpoint)), LIMITS)


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("llama", USUAL),
        ("phi3", ["o_proj", "down_proj"]),
        ("glm4", [*ATTENTION, "down_proj"]),
        ("mixtral", ATTENTION),
        ("qwen3_moe", USUAL),
        ("gemma4_text", USUAL),  # v_proj in layers with windows alone
    ],
)
def test_usual_targets_select_the_linears_that_the_base_model_has(
    family: str, found: list[str], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    blob = packed(tiny_checkpoints[family], tmp_path, USUAL)
    assert spec_on(tiny_checkpoints[family], blob).touches.linears == tuple(found)


@pytest.mark.parametrize("family", ["llama", "glm4", "qwen3_moe"])
def test_a_file_with_attention_only_is_incomplete_if_the_base_model_has_the_other_targets(
    family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    blob = packed(tiny_checkpoints["llama"], tmp_path, ATTENTION, USUAL)
    with pytest.raises(AdapterRejected, match=INCOMPLETE) as refused:
        spec_on(tiny_checkpoints[family], blob)
    assert refused.value.fields["field"] == "target_modules"


@pytest.mark.parametrize(
    ("family", "trained", "targets"),
    [
        ("mixtral", ATTENTION, [*ATTENTION, "w1", "w2", "w3"]),
        ("mixtral", ATTENTION, r".*\.(?:[qkvo]_proj|block_sparse_moe\.experts\.\d\.w[123])"),
        ("mixtral", ATTENTION, r".*\.(?:[qkvo]_proj|block_sparse_moe\.gate)"),
        ("phi3", ["o_proj"], ["o_proj", "gate_up_proj"]),
    ],
)
def test_missing_linears_are_named_as_in_their_family(
    family: str,
    trained: list[str],
    targets: list[str] | str,
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    blob = packed(tiny_checkpoints[family], tmp_path, trained, targets)
    with pytest.raises(AdapterRejected, match=INCOMPLETE):
        spec_on(tiny_checkpoints[family], blob)


def test_a_blob_lists_families_only_if_some_are_excluded(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    parameters = [
        "gpt_oss",
        "granitemoehybrid",
        "mixtral",
    ]  # PEFT finds no linears in their experts
    for name, targets, families in (("all", ATTENTION, None), ("some", USUAL, parameters)):
        blob = packed(tiny_checkpoints["mixtral"], tmp_path / name, ATTENTION, targets)
        with safe_open(blob, "pt") as file:
            assert json.loads(file.metadata()["lorikeet"]).get("families") == families


@pytest.mark.parametrize("trained", [["q_proj", "v_proj"], USUAL, ["v_proj"], ["o_proj"]])
def test_layers_of_gemma_4_without_values_of_their_own_need_no_weights_for_v_proj(
    trained: list[str], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints["gemma4_deep"]
    spec = spec_on(checkpoint, packed(checkpoint, tmp_path, trained))
    shape = BaseShape.from_config(read_config(checkpoint))
    windows = [kind is LayerKind.WINDOW for kind in shape.kinds]
    layers = {name: [*range(shape.layers)] for name in trained}
    if "v_proj" in trained:
        layers["v_proj"] = [layer for layer, windowed in enumerate(windows) if windowed]
    found = {(part.layer, part.name.rpartition(".")[2]) for part in spec.linears}
    assert found == {(layer, name) for name in trained for layer in layers[name]}


def test_an_adapter_of_gemma_4_that_lacks_a_layers_queries_is_incomplete(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints["gemma4_deep"]
    packed(checkpoint, tmp_path, ["q_proj", "v_proj"])
    file = tmp_path / "adapter_model.safetensors"
    kept = {name: each for name, each in load_file(file).items() if ".5.self_attn" not in name}
    save_file(kept, file)
    with pytest.raises(AdapterRejected, match=r"it selects model\.layers\.5\.self_attn\.q_proj"):
        write_blob(tmp_path, tmp_path / "other")


def test_an_adapter_with_values_in_every_layer_is_for_another_base_model(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    blob = packed(tiny_checkpoints["llama"], tmp_path, ["v_proj"])
    with pytest.raises(AdapterRejected, match="layer 1 of the base model is attention and has no"):
        spec_on(tiny_checkpoints["gemma4_text"], blob)
