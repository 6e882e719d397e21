"""Adapters on experts, in all saved forms, change each expert as PEFT's do."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import (
    AdapterLimits,
    AdapterSpec,
    BaseShape,
    read_spec,
    write_blob,
)
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.disk.image_file import ImageFile, write_image
from lorikeet_engine.residency.packed_image import PackedImage, PackedLayout
from tests.engine.adapter_format.peft_folder import edit_config
from tests.engine.conftest import MOE
from tests.engine.moe_adapters import (
    BOTH,
    PARAMETERS,
    peft_deltas,
    save_again,
    save_numbered,
    save_shared,
    shared_deltas,
)
from tests.engine.peft_adapters import save_adapter

LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 24)


def shape_of(checkpoint: Path) -> BaseShape:
    return BaseShape.from_config(json.loads((checkpoint / "config.json").read_text()))


def specified(checkpoint: Path, folder: Path) -> AdapterSpec:
    write_blob(folder, folder / "blob")
    return read_spec(folder / "blob", shape_of(checkpoint), LIMITS)


def matrices(image: torch.Tensor, at: int, count: int, rank: int, width: int) -> torch.Tensor:
    """Return one linear's A, or its transposed B: [count, rank, width].

    at: place of the matrix in PackedLayout.rows, odd if all experts share it.
    """
    stored, begin = 1 if at % 2 else count, at - at % 2
    found = image[begin : begin + stored * rank * width].view(stored, rank, width)
    return found.expand(count, rank, width)


def packed_deltas(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    """B A of every linear in the adapter's image, by path; stacked for experts."""
    shape, spec = shape_of(checkpoint), specified(checkpoint, folder)
    layout = PackedLayout.of(spec, shape)
    assert layout.elements == spec.packed_elements(shape.dims)
    image = torch.empty(layout.elements)
    pack(folder / "blob", spec, layout, image)
    deltas = {}
    for part in spec.linears:
        a_at, b_at, rank = layout.rows[part.layer, part.linear].tolist()
        count = shape.matrices(part.linear)
        a, b = (
            matrices(image, at, count, rank, width)
            for at, width in zip((a_at, b_at), shape.dims(part.linear), strict=True)
        )
        delta = b.mT @ a
        path = shape.linears[part.linear].path(part.layer)
        deltas[path] = delta if ".experts." in path else delta[0]
    return deltas


def assert_as_peft(checkpoint: Path, folder: Path) -> None:
    ours, theirs = packed_deltas(checkpoint, folder), peft_deltas(checkpoint, folder)
    for name, delta in theirs.items():
        if shape_of(checkpoint).family == "gpt_oss" and ".experts." in name:
            delta = delta.mT  # the parameter is [experts, d_in, d_out]
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            halves = delta.chunk(2, dim=1)
            if shape_of(checkpoint).family == "gpt_oss":
                halves = delta[:, 0::2], delta[:, 1::2]
            wanted = dict(zip((f"{stem}gate_proj", f"{stem}up_proj"), halves, strict=True))
        else:
            wanted = {name.removesuffix(".weight"): delta}
        for path, want in wanted.items():
            if path not in ours:
                assert not want.any(), f"{path} is changed by PEFT alone"
                continue
            torch.testing.assert_close(ours.pop(path), want, rtol=1e-4, atol=1e-5)
    assert not ours


# PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/lora.py, names all experts of a layer at once,
# NVIDIA-NeMo/Automodel, nemo_automodel/components/checkpoint/addons.py, each one's linears.
NAMED_OTHERWISE = {
    "prime-rl": ["experts"],
    "NeMo AutoModel": [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
        for layer in range(94)
        for expert in range(128)
        for name in ("gate", "up", "down")
    ],
}


@pytest.mark.parametrize("targets", NAMED_OTHERWISE.values(), ids=NAMED_OTHERWISE)
def test_experts_may_be_targeted_all_at_once_or_each_by_its_name(
    targets: list[str], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints["qwen3_moe"]
    folder = save_numbered(checkpoint, tmp_path / "a", rank=3)
    want = packed_deltas(checkpoint, folder)
    edit_config(folder, target_modules=targets)
    torch.testing.assert_close(packed_deltas(checkpoint, folder), want)
    edit_config(folder, target_modules=[*targets, "o_proj"])
    with pytest.raises(AdapterRejected, match=r"selects model\.layers\.0\.self_attn\.o_proj"):
        write_blob(folder, folder / "blob")
    shutil.rmtree(folder)
    save_adapter(checkpoint, folder, target_modules=["q_proj"], r=2)
    edit_config(folder, target_modules=[*targets, "q_proj"])
    with pytest.raises(AdapterRejected, match="linears of Qwen 3 MoE that have no weights"):
        specified(checkpoint, folder)


@pytest.mark.parametrize(
    ("family", "block"), [("qwen3_moe", "mlp"), ("mixtral", "block_sparse_moe")]
)
def test_adapters_of_mlx_change_each_expert_as_in_mlx(
    family: str, block: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Adapters of the router and SwitchGLU's linears, as mlx_lm.lora trains by default."""
    shape, generator, tensors, wanted = (
        shape_of(tiny_checkpoints[family]),
        torch.Generator(),
        {},
        {},
    )
    for name in ("gate", "gate_proj", "up_proj", "down_proj"):
        linear, (d_in, d_out) = shape.linears[shape.index(name)], shape.dims(shape.index(name))
        a = torch.randn(shape.experts, 3, d_in, generator=generator)
        b = torch.randn(shape.experts, d_out, 3, generator=generator)
        wanted[linear.path(1)] = 2.0 * (b @ a if linear.of_experts else b[0] @ a[0])
        saved = f"model.layers.1.{block}.{name if name == 'gate' else f'switch_mlp.{name}'}.lora"
        pair = (a, b) if linear.of_experts else (a[0].T, b[0].T)
        tensors |= {f"{saved}_{side}": t.contiguous() for side, t in zip("ab", pair, strict=True)}
    save_file(tensors, tmp_path / "adapters.safetensors")
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 3, "scale": 2.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    torch.testing.assert_close(packed_deltas(tiny_checkpoints[family], tmp_path), wanted)


@pytest.mark.parametrize("form", PARAMETERS)
@pytest.mark.parametrize("family", MOE)
def test_adapters_on_parameters_change_each_expert_as_in_peft(
    family: str, form: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_adapter(tiny_checkpoints[family], tmp_path / form, **PARAMETERS[form])
    assert_as_peft(tiny_checkpoints[family], folder)


@pytest.mark.parametrize("family", MOE)
def test_an_a_that_gate_and_up_share_is_stored_once(
    family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint, shape = tiny_checkpoints[family], shape_of(tiny_checkpoints[family])
    folder = save_adapter(checkpoint, tmp_path / "one", **PARAMETERS["gate_up"])
    spec = specified(checkpoint, folder)
    saved = load_file(folder / "adapter_model.safetensors")
    numbers = sum(tensor.numel() for tensor in saved.values())
    assert sum(tensor.numel() for tensor in load_file(folder / "blob").values()) == numbers
    assert spec.packed_elements(shape.dims) == spec.touches.parameters == numbers
    layout = PackedLayout.of(spec, shape)
    gate, up = (layout.rows[:, shape.index(name)] for name in ("gate_proj", "up_proj"))
    assert torch.equal(gate[:, 0], up[:, 0])
    assert (gate[:-1, 1] != up[:-1, 1]).all()


@pytest.mark.parametrize("family", MOE)
def test_an_image_with_a_shared_a_is_read_unchanged(
    family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint, shape = tiny_checkpoints[family], shape_of(tiny_checkpoints[family])
    folder = save_adapter(checkpoint, tmp_path / "one", **PARAMETERS["both"])
    spec = specified(checkpoint, folder)
    layout = PackedLayout.of(spec, shape)
    image = torch.empty(layout.elements)
    sums = pack(folder / "blob", spec, layout, image)
    write_image(tmp_path / "image", "image", PackedImage(layout, image, sums))
    file = ImageFile.of(tmp_path / "image", shape)
    assert torch.equal(file.layout.rows, layout.rows)
    out = torch.full_like(image, torch.nan)
    assert file.read(out) == sums
    assert torch.equal(out, image)


@pytest.mark.parametrize("missing", ["gate_proj.lora_A", "gate_proj.lora_B"])
def test_a_blob_may_lack_no_other_matrix_than_a_shared_a(
    missing: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints["mixtral"]
    folder = save_adapter(checkpoint, tmp_path / "one", **PARAMETERS["gate_up"])
    write_blob(folder, tmp_path / "blob")
    tensors = load_file(tmp_path / "blob")
    with safe_open(tmp_path / "blob", "pt") as blob:
        metadata = blob.metadata()
    (spoilt,) = (name for name in tensors if f"layers.0.mlp.experts.{missing}" in name)
    del tensors[spoilt]
    save_file(tensors, tmp_path / "blob", metadata)
    with pytest.raises(AdapterRejected, match="is missing"):
        read_spec(tmp_path / "blob", shape_of(checkpoint), LIMITS)


@pytest.mark.parametrize("family", MOE)
def test_matrices_of_each_expert_change_it_as_in_peft(
    family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    old = family == "mixtral"
    folder = save_numbered(tiny_checkpoints[family], tmp_path / "old", 3, old_names=old)
    assert_as_peft(tiny_checkpoints[family], folder)


def test_matrices_of_each_expert_are_scaled_as_they_were_trained(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """PEFT converts to parameters, scales gate and up by √2, and drops their pattern."""
    checkpoint, alphas = tiny_checkpoints["qwen3_moe"], {"up_proj": 5}
    folder = save_numbered(checkpoint, tmp_path / "old", 4, use_rslora=True, alpha_pattern=alphas)
    gate, up, down = specified(checkpoint, folder).linears[:3]
    assert (gate.scaling, up.scaling, down.scaling) == (8 / 2, 5 / 2, 8 / 2)


@pytest.mark.parametrize("family", MOE)
def test_an_adapter_that_peft_converted_is_split_back_to_its_trained_rank(
    family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints[family]
    old = save_numbered(
        checkpoint, tmp_path / "old", 4, old_names=family == "mixtral", use_rslora=True
    )
    converted = save_again(checkpoint, old, tmp_path / "converted")
    assert {part.rank for part in specified(checkpoint, converted).linears} == {4}
    assert_as_peft(checkpoint, converted)


def test_a_shared_matrix_applies_to_every_expert(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints["mixtral"]
    folder = save_shared(checkpoint, tmp_path / "shared", 2)
    ours, names = packed_deltas(checkpoint, folder), {"w1": "gate", "w2": "down", "w3": "up"}
    for path, delta in shared_deltas(folder, scaling=8 / 2).items():
        stem, _, name = path.removeprefix("base_model.model.").rpartition(".")
        torch.testing.assert_close(ours.pop(f"{stem}.{names[name]}_proj"), delta)
    assert not ours


@pytest.mark.parametrize("world", [1, 2])
def test_a_shared_matrix_is_stored_once_in_blob_and_image(
    world: int, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint, shape = tiny_checkpoints["qwen3_moe"], shape_of(tiny_checkpoints["qwen3_moe"])
    folder = save_shared(checkpoint, tmp_path / "shared", 2)
    spec = specified(checkpoint, folder)
    saved = load_file(folder / "adapter_model.safetensors")
    numbers = sum(tensor.numel() for tensor in saved.values())
    assert sum(tensor.numel() for tensor in load_file(folder / "blob").values()) == numbers
    layout, kept = PackedLayout.of(spec, shape, world), Shard(0, world).ranges(shape)
    assert layout.elements == spec.packed_elements(lambda linear: kept[linear].dims)
    ranks = {(part.layer, part.linear): part.rank for part in spec.linears}
    assert layout.elements < PackedLayout.of_ranks(ranks, shape, world).elements
    if world == 1:
        assert layout.elements == spec.touches.parameters == numbers
    elements = torch.full((layout.image_elements,), torch.nan)
    image = PackedImage(layout, elements, pack(folder / "blob", spec, layout, elements))
    write_image(tmp_path / "image", "image", image)
    file = ImageFile.of(tmp_path / "image", shape, world)
    assert torch.equal(file.layout.rows, layout.rows)
    assert file.layout.shared_outer == layout.shared_outer
    out = torch.full_like(elements, torch.nan)
    assert file.read(out) == image.sums
    assert torch.equal(out, elements)


def test_halves_of_one_b_are_shared_together_or_not(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints["gpt_oss"]
    folder = save_adapter(checkpoint, tmp_path / "one", **PARAMETERS["gate_up"])
    write_blob(folder, tmp_path / "blob")
    tensors = load_file(tmp_path / "blob")
    with safe_open(tmp_path / "blob", "pt") as blob:
        metadata = blob.metadata()
    (name,) = (name for name in tensors if "layers.0.mlp.experts.up_proj.lora_B" in name)
    tensors[name] = tensors[name][:1].clone()
    save_file(tensors, tmp_path / "blob", metadata)
    with pytest.raises(AdapterRejected, match=r"layers\.0\.up_proj.lora_B is \[1, .* halves"):
        read_spec(tmp_path / "blob", shape_of(checkpoint), LIMITS)


def test_a_blob_of_many_experts_has_few_tensors(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints["qwen3_moe"]
    folder = save_numbered(checkpoint, tmp_path / "old", 3)
    write_blob(folder, tmp_path / "blob")
    layers, linears_of_experts = shape_of(checkpoint).layers, 3
    assert len(load_file(tmp_path / "blob")) == 2 * layers * linears_of_experts


def test_parameters_that_the_config_leaves_ambiguous_are_refused(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_adapter(tiny_checkpoints["mixtral"], tmp_path / "one", **PARAMETERS["down"])
    edit_config(folder, target_parameters=["gate_up_proj", "down_proj"])
    with pytest.raises(AdapterRejected, match="selects gate_up_proj and down_proj"):
        write_blob(folder, tmp_path / "blob")


def test_a_targeted_parameter_without_weights_is_refused(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_adapter(tiny_checkpoints["mixtral"], tmp_path / "router", **PARAMETERS["router"])
    edit_config(folder, target_parameters=["gate.weight", "experts.down_proj"])
    with pytest.raises(AdapterRejected, match=r"selects model.layers.0.mlp.experts.down_proj"):
        write_blob(folder, tmp_path / "blob")


def test_an_expert_without_weights_is_refused(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_numbered(tiny_checkpoints["qwen3_moe"], tmp_path / "old", 3)
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {
        name: tensor for name, tensor in tensors.items() if "layers.1.mlp.experts.2" not in name
    }
    save_file(kept, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterRejected, match=r"layers.1.mlp.experts.2"):
        write_blob(folder, tmp_path / "blob")


def test_linears_of_experts_are_distinguished_from_a_dense_mlps(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_adapter(tiny_checkpoints["llama"], tmp_path / "dense", target_modules=["up_proj"])
    with pytest.raises(AdapterRejected, match=r"mlp\.up_proj cannot.* experts\.up_proj, experts\."):
        specified(tiny_checkpoints["qwen3_moe"], folder)


@pytest.mark.parametrize("only", [0, 2])
def test_a_single_experts_matrices_are_not_applied_to_all(
    only: int, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_numbered(tiny_checkpoints["qwen3_moe"], tmp_path / "old", 3)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: t for name, t in tensors.items() if f".experts.{only}." in name}, path)
    edit_config(folder, target_modules=rf".*\.experts\.{only}\.\w+")
    with pytest.raises(AdapterRejected, match="weights for 1 of the experts"):
        write_blob(folder, tmp_path / "blob")


def test_an_expert_of_another_rank_is_refused(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    odd = "model.layers.0.mlp.experts.1.up_proj"
    folder = save_numbered(tiny_checkpoints["qwen3_moe"], tmp_path / "old", 3)
    tensors = load_file(folder / "adapter_model.safetensors")
    for side, kept in (("A", (slice(2), slice(None))), ("B", (slice(None), slice(2)))):
        name = f"base_model.model.{odd}.lora_{side}.weight"
        tensors[name] = tensors[name][kept].contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    edit_config(folder, rank_pattern={odd: 2})
    with pytest.raises(AdapterRejected, match=f"{odd} has another shape"):
        write_blob(folder, tmp_path / "blob")


def test_an_adapter_for_another_number_of_experts_is_refused(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_numbered(tiny_checkpoints["qwen3_moe"], tmp_path / "old", 3)
    write_blob(folder, tmp_path / "blob")
    shape = replace(shape_of(tiny_checkpoints["qwen3_moe"]), experts=8)
    with pytest.raises(AdapterRejected, match="is for 6 experts and the base model has 8"):
        read_spec(tmp_path / "blob", shape, LIMITS)


def test_the_scaling_of_a_split_parameter_is_that_of_the_whole(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints["mixtral"]
    old = save_numbered(checkpoint, tmp_path / "old", 4, old_names=True, use_rslora=True)
    spec = specified(checkpoint, save_again(checkpoint, old, tmp_path / "converted"))
    gate = spec.linears[0]
    assert math.isclose(gate.scaling, 16 / math.sqrt(8), rel_tol=1e-6)


def test_a_wrapped_parameter_is_never_read_as_a_shared_matrix(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints["mixtral"]
    folder = save_adapter(checkpoint, tmp_path / "one", **PARAMETERS["down"])
    rank = json.loads((folder / "adapter_config.json").read_text())["r"]
    edit_config(folder, r=rank * shape_of(checkpoint).experts)
    with pytest.raises(AdapterRejected, match=r"is not \[experts · rank, d_in\]"):
        write_blob(folder, tmp_path / "blob")


def test_an_experts_number_has_one_spelling(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_numbered(tiny_checkpoints["qwen3_moe"], tmp_path / "old", 3)
    _rename(folder / "adapter_model.safetensors", ".experts.1.", ".experts.01.")
    with pytest.raises(AdapterRejected, match=r"experts\.01\.\w+ cannot be adapted"):
        specified(tiny_checkpoints["qwen3_moe"], folder)


@pytest.mark.parametrize("other", [".experts.3.gate_proj.", ".experts.gate_up_proj."])
def test_a_blob_with_other_names_than_write_blobs_is_refused(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, other: str
) -> None:
    checkpoint = tiny_checkpoints["qwen3_moe"]
    write_blob(save_numbered(checkpoint, tmp_path / "old", 3), tmp_path / "blob")
    _rename(tmp_path / "blob", ".experts.gate_proj.", other)
    with pytest.raises(AdapterRejected, match="is not what packed adapters call"):
        read_spec(tmp_path / "blob", shape_of(checkpoint), LIMITS)


def _rename(path: Path, old: str, new: str) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata)


GPT_OSS_FORMS = PARAMETERS | {"router": {"target_parameters": ["mlp.router.weight"], "r": 2}}


@pytest.mark.parametrize("form", [name for name in GPT_OSS_FORMS if name != "all"])
def test_adapters_of_gpt_oss_experts_change_what_peft_changes(
    form: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints["gpt_oss"]
    folder = save_adapter(checkpoint, tmp_path / "a", 1, **GPT_OSS_FORMS[form])
    assert_as_peft(checkpoint, folder)


def test_adapters_of_gpt_oss_attention_and_router_change_what_peft_changes(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    options = {"target_modules": "all-linear", "target_parameters": ["mlp.router.weight"]}
    folder = save_adapter(tiny_checkpoints["gpt_oss"], tmp_path / "a", 1, r=3, **options)
    assert_as_peft(tiny_checkpoints["gpt_oss"], folder)


def gpt_oss_as_wide_as_hidden(folder: Path, width: int = 32) -> Path:
    """Save a gpt-oss whose experts are as wide as the hidden size, as both released ones are.

    width: another width of the experts.
    """
    sizes = {"hidden_size": 32, "intermediate_size": width, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**sizes, **heads, **experts, vocab_size=64, pad_token_id=0)
    transformers.GptOssForCausalLM(config).save_pretrained(folder)
    return folder


def transpose_as_other_releases(folder: Path) -> None:
    """Write an adapter's experts as PEFT does that takes their parameters as [experts, out, in]."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    out: dict[str, torch.Tensor] = {}
    for name, a in tensors.items():
        if "lora_A" not in name or ".experts." not in name:
            out.setdefault(name, a)
            continue
        b_name = name.replace("lora_A", "lora_B")
        b, experts = tensors[b_name], 3
        rank = len(a) // experts
        by_expert_a = a.view(experts, rank, -1)
        by_expert_b = b.view(len(b), rank, experts)
        out[name] = by_expert_b.permute(2, 1, 0).reshape(experts * rank, -1).contiguous()
        out[b_name] = by_expert_a.permute(2, 1, 0).reshape(-1, rank * experts).contiguous()
    save_file(out, path)


# Of PEFT 0.17.1 to 0.21.2 with transformers 4.57 and 5.24, those that transpose: 0.19.0 with
# transformers 5, later releases with transformers 4.
SHOWN = {
    "both": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gate_up": ["mlp.experts.gate_up_proj"],
}


@pytest.mark.parametrize("transposed", [False, True], ids=["as_today", "transposed"])
@pytest.mark.parametrize("release", [None, "0.18.1", "0.19.0", "0.19.1", "0.21.2"])
@pytest.mark.parametrize("form", SHOWN)
def test_the_shapes_of_gpt_oss_gate_up_proj_show_how_it_is_stored(
    form: str, release: str | None, transposed: bool, tmp_path: Path
) -> None:
    checkpoint = gpt_oss_as_wide_as_hidden(tmp_path / "gpt-oss")
    options = {"target_modules": [], "target_parameters": SHOWN[form], "r": 3}
    folder = save_adapter(checkpoint, tmp_path / "a", 1, **options)
    want = packed_deltas(checkpoint, folder)
    assert_as_peft(checkpoint, folder)
    if transposed:
        transpose_as_other_releases(folder)
    edit_config(folder, peft_version=release, base_model_name_or_path="openai/gpt-oss-20b")
    torch.testing.assert_close(packed_deltas(checkpoint, folder), want)


@pytest.mark.parametrize(
    ("release", "transposed", "warns"),
    [("0.18.1", False, False), ("0.19.0", True, True), ("0.21.2", False, True)],
)
@pytest.mark.parametrize("targets", [[], ["q_proj"]], ids=["alone", "beside_attention"])
def test_a_gpt_oss_down_proj_alone_is_read_as_its_release_of_peft_stores_it(
    release: str, transposed: bool, warns: bool, targets: list[str], tmp_path: Path
) -> None:
    checkpoint = gpt_oss_as_wide_as_hidden(tmp_path / "gpt-oss")
    options = {"target_modules": targets, "target_parameters": BOTH[1:], "r": 3}
    folder = save_adapter(checkpoint, tmp_path / "a", 1, **options)
    want = packed_deltas(checkpoint, folder)
    if transposed:
        transpose_as_other_releases(folder)
    edit_config(folder, peft_version=release, base_model_name_or_path="unsloth/gpt-oss-20b-BF16")
    torch.testing.assert_close(packed_deltas(checkpoint, folder), want)
    warnings: list[str] = []
    write_blob(folder, tmp_path / "blob", warnings.append)
    assert bool(warnings) == warns
    assert all("transformers 4 and 5" in warning for warning in warnings)


@pytest.mark.parametrize("parameter", BOTH)
def test_gpt_oss_experts_read_as_another_base_models_are_refused_by_name(
    parameter: str, tmp_path: Path
) -> None:
    checkpoint = gpt_oss_as_wide_as_hidden(tmp_path / "base")
    options = {"target_modules": [], "target_parameters": [parameter], "r": 3}
    folder = save_adapter(checkpoint, tmp_path / "a", 1, **options)
    edit_config(folder, peft_version="0.18.1", base_model_name_or_path="/data/base")
    with pytest.raises(AdapterRejected, match="the base model is gpt-oss") as error:
        specified(checkpoint, folder)
    assert error.value.field == "base_model_name_or_path"


def test_experts_read_as_gpt_oss_are_refused_by_another_base_model(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    shape = shape_of(tiny_checkpoints["qwen3_moe"])
    folder = save_adapter(
        tiny_checkpoints["qwen3_moe"], tmp_path / "a", target_parameters=BOTH[1:], r=3,
        target_modules=[],
    )  # fmt: skip
    edit_config(folder, peft_version="0.18.1", base_model_name_or_path="me/gpt-oss-distilled")
    write_blob(folder, tmp_path / "blob")
    read_spec(tmp_path / "blob", shape, LIMITS)  # its widths show that it is read as it should be
    square = replace(shape, hidden=shape.intermediate)
    with pytest.raises(AdapterRejected, match="were read for gpt-oss"):
        read_spec(tmp_path / "blob", square, LIMITS)


@pytest.mark.parametrize("width", [17, 33])
def test_rows_of_gate_and_up_alternate_at_any_width(width: int, tmp_path: Path) -> None:
    checkpoint = gpt_oss_as_wide_as_hidden(tmp_path / "gpt-oss", width)
    options = {"target_modules": ["v_proj"], "target_parameters": BOTH, "r": 2}
    assert_as_peft(checkpoint, save_adapter(checkpoint, tmp_path / "a", 1, **options))


def test_a_gpt_oss_gate_up_proj_alone_needs_no_name_of_the_base_model(tmp_path: Path) -> None:
    checkpoint = gpt_oss_as_wide_as_hidden(tmp_path / "base")
    options = {"target_modules": [], "target_parameters": BOTH[:1], "r": 3}
    folder = save_adapter(checkpoint, tmp_path / "a", 1, **options)
    edit_config(folder, base_model_name_or_path="/data/base")
    assert_as_peft(checkpoint, folder)


def test_gpt_oss_experts_read_from_an_image_file_are_those_that_were_packed(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    shape = shape_of(tiny_checkpoints["gpt_oss"])
    options = {"target_modules": ["q_proj"], "target_parameters": BOTH, "r": 3}
    folder = save_adapter(tiny_checkpoints["gpt_oss"], tmp_path / "a", 1, **options)
    spec = specified(tiny_checkpoints["gpt_oss"], folder)
    layout = PackedLayout.of(spec, shape, world=2)
    image = torch.empty(layout.image_elements)
    sums = pack(folder / "blob", spec, layout, image)
    write_image(tmp_path / "image", "image", PackedImage(layout, image, sums))
    found, read = ImageFile.of(tmp_path / "image", shape, world=2), torch.empty_like(image)
    assert found.read(read) == sums
    assert torch.equal(read, image)
    assert torch.equal(found.layout.rows, layout.rows)


def group_by_expert(folder: Path, experts: int) -> None:
    """Order the columns of B by experts, as Unsloth did before 2026.9.6."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, b in tensors.items():
        if ".experts." in name and "lora_B" in name:
            tensors[name] = b.view(len(b), -1, experts).mT.reshape(b.shape).contiguous()
    save_file(tensors, path)


def unsloth_detail(**layouts: str) -> dict[str, object]:
    """Return the note of Unsloth's about the order of each parameter's B."""
    return {"parameters": {name: {"lora_B_layout": layout} for name, layout in layouts.items()}}


@pytest.mark.parametrize(
    "note",
    [
        {"lora_B_layout": "grouped_by_expert"},
        {"auto_mapping": {"unsloth_fixed": True, "lora_B_layout": "grouped_by_expert"}},
        {
            "unsloth_fused_expert_lora": unsloth_detail(
                gate_up_proj="grouped_by_expert", down_proj="grouped_by_expert"
            )
        },
    ],
    ids=["in_the_config", "in_the_mapping", "by_parameter"],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_order_that_unsloth_notes_is_followed(
    family: str, note: dict[str, object], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints[family]
    folder = save_adapter(checkpoint, tmp_path / "a", 1, **PARAMETERS["both"])
    want = packed_deltas(checkpoint, folder)
    group_by_expert(folder, shape_of(checkpoint).experts)
    edit_config(folder, **note)
    torch.testing.assert_close(packed_deltas(checkpoint, folder), want)


def test_an_order_that_unsloth_does_not_note_is_refused_by_name(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoints["qwen3_moe"]
    folder = save_adapter(checkpoint, tmp_path / "a", 1, **PARAMETERS["both"])
    edit_config(folder, auto_mapping={"unsloth_fixed": True})
    with pytest.raises(AdapterRejected, match=r"Unsloth before 2026\.9\.6") as error:
        write_blob(folder, folder / "blob")
    assert error.value.field == "lora_B_layout"
    edit_config(folder, lora_B_layout="rank_major")
    assert_as_peft(checkpoint, folder)
    attention = save_adapter(checkpoint, tmp_path / "attention", target_modules=["q_proj"], r=2)
    edit_config(attention, auto_mapping={"unsloth_fixed": True})
    assert_as_peft(checkpoint, attention)


def test_unsloths_lists_of_experts_are_gpt_oss_alone(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tensors = {}
    shape = shape_of(tiny_checkpoints["qwen3_moe"])
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            path = f"base_model.model.model.layers.{layer}.mlp.experts.gate_up_projs.{expert}"
            tensors[f"{path}.lora_A.weight"] = torch.ones(2, shape.hidden)
            tensors[f"{path}.lora_B.weight"] = torch.ones(2 * shape.intermediate, 2)
    folder = save_numbered(tiny_checkpoints["qwen3_moe"], tmp_path / "a", rank=2)
    save_file(tensors, folder / "adapter_model.safetensors")
    for targets in ([f"gate_up_projs.{expert}" for expert in range(shape.experts)], None):
        edit_config(folder, target_modules=targets)
        write_blob(folder, folder / "blob")
        with pytest.raises(AdapterRejected, match="linears of Qwen 3 MoE that have no weights"):
            read_spec(folder / "blob", shape, LIMITS)
