"""Experts in MXFP4 of gpt-oss's checkpoints have exactly the values of the format's definition."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lorikeet_engine.errors import ModelError
from lorikeet_engine.execution.assembly import assemble, stays_packed
from lorikeet_engine.kernels.moe.mxfp4 import Mxfp4Experts
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.experts import Experts
from lorikeet_engine.models.llama import load_model, rehearse_load
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.settings import EngineSettings
from tests.engine.blobs import Shelf
from tests.engine.conftest import GPT_OSS, save_all
from tests.engine.models.test_models import Run, assert_equal, prompt_of, reference

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
SIZES = {"intermediate_size": 96, "num_local_experts": 3, "num_experts_per_tok": 2}


def values_of(blocks, scales):
    """Values [experts, d_in, d_out] by the definition, a number at a time."""
    experts, d_out, groups, _ = blocks.shape
    out = torch.empty(experts, groups * 32, d_out, dtype=torch.float64)
    for (expert, row, group, at), byte in zip(
        torch.cartesian_prod(*map(torch.arange, blocks.shape)).tolist(),
        blocks.flatten().tolist(),
        strict=True,
    ):
        scale = 2.0 ** (int(scales[expert, row, group]) - 127)
        for half, code in enumerate((byte & 15, byte >> 4)):
            level = LEVELS[code & 7] * (-1 if code & 8 else 1)
            out[expert, group * 32 + 2 * at + half, row] = level * scale
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of MXFP4, and one of the floats that it stands for."""
    folder = tmp_path_factory.mktemp("mxfp4")
    floats = save_all({"floats": GPT_OSS["gpt_oss"] | SIZES}, folder)["floats"]
    tensors, random = load_file(floats / "model.safetensors"), torch.Generator().manual_seed(4)
    packed, exact = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, d_in, d_out = weight.shape
            shape = experts, d_out, d_in // 32
            blocks = torch.randint(256, (*shape, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(120, 125, shape, generator=random, dtype=torch.uint8)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            exact[name] = values_of(blocks, scales).float()
            theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert torch.equal(exact[name], theirs)
    config = json.loads((floats / "config.json").read_text())
    write(folder / "packed", packed, config | {"quantization_config": CONFIG})
    write(folder / "exact", exact, config)
    return folder / "packed", folder / "exact"


def write(folder, tensors, config):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def edited(folder, out, change, **keys):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    config = json.loads((folder / "config.json").read_text())
    write(out, tensors, config | keys)
    return out


def load(folder, rounding=None, packed=False):
    cpu = torch.device("cpu")
    return load_model(folder, cpu, torch.float32, rounding=rounding, packed=packed)


def floats(weight):
    return torch.stack([weight.floats(expert) for expert in range(weight.shape[0])])


@pytest.mark.parametrize("stays_packed", [False, True])
def test_the_model_computes_what_transformers_computes_with_the_exact_values(
    folders, paged_tokens, stays_packed
):
    packed, exact = folders
    prompt = prompt_of(70)
    run = Run(packed, paged_tokens(), model=load(packed, packed=stays_packed))
    run.step({"a": prompt})
    assert_equal(run.of("a"), reference(exact, prompt))


@pytest.mark.parametrize(("world", "stays_packed"), [(2, False), (3, True)])
def test_ranks_keep_their_parts_of_the_values(folders, monkeypatch, world, stays_packed):
    packed, exact = folders
    monkeypatch.setattr(Shard, "ranges", lambda *_: ())  # 3 ranks share no heads
    config = ModelConfig.from_folder(packed)
    arguments = packed, torch.device("cpu"), torch.float32, config.quantized_linears
    kept = []
    for index in range(world):
        shard = Shard(index, world)
        with Checkpoint(*arguments, shard=shard, packed=stays_packed) as checkpoint:
            kept.append(Experts(config, checkpoint, 0))
    tensors, path = load_file(exact / "model.safetensors"), "model.layers.0.mlp.experts"
    gates, values = (tensors[f"{path}.gate_up_proj"][..., at::2].mT for at in range(2))
    for index, each in enumerate(kept):
        own = slice(96 * index // world, 96 * (index + 1) // world)
        assert isinstance(each.gate_up, Mxfp4Experts if stays_packed else torch.Tensor)
        gate_up, down = map(floats if stays_packed else torch.clone, (each.gate_up, each.down))
        assert torch.equal(gate_up, torch.cat([gates[:, own], values[:, own]], dim=1))
        assert torch.equal(down, tensors[f"{path}.down_proj"].mT[..., own])
    assert kept[1].biases.down is None, "it is added once"


def test_ranks_that_would_share_blocks_are_refused(folders):
    shard = Shard(0, 2)
    with pytest.raises(ModelError, match=r"down_proj.*0 to 48.*another number of GPUs") as error:
        rehearse_load(folders[0], torch.float32, shard=shard, packed=True)
    assert error.value.field == "weight_dtype"
    rehearse_load(folders[0], torch.float32, shard=shard)


@pytest.mark.parametrize("scale", [0, 1, 127, 250])
def test_the_smallest_and_largest_scales_are_exact(folders, tmp_path, scale):
    name = "model.layers.1.mlp.experts.down_proj"
    folder = edited(folders[0], tmp_path / "m", lambda t: t[f"{name}_scales"].fill_(scale))
    stored = load_file(folder / "model.safetensors")
    want = values_of(stored[f"{name}_blocks"], stored[f"{name}_scales"]).mT
    assert torch.equal(load(folder)._layers[1].mlp.experts.down.double(), want)


def test_a_scale_of_255_is_no_number(folders, tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    folder = edited(folders[0], tmp_path / "m", lambda t: t[f"{name}_scales"].fill_(255))
    assert load(folder)._layers[0].mlp.experts.gate_up.isnan().all()


@pytest.mark.parametrize("name", ["gate_up_proj_scales", "down_proj_blocks"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_tensor_of_another_layout_is_refused_by_its_name(folders, tmp_path, name, packed):
    path = f"model.layers.1.mlp.experts.{name}"
    folder = edited(folders[0], tmp_path / "m", lambda t: t.update({path: t[path].mT.contiguous()}))
    with pytest.raises(ModelError, match=path) as error:
        load(folder, packed=packed)
    assert error.value.field == path


@pytest.mark.parametrize("stored", [{"quant_method": "fp8"}, {"quant_method": "quark"}])
def test_other_formats_of_experts_are_refused_by_name(folders, tmp_path, stored):
    folder = edited(folders[0], tmp_path / "m", lambda _: None, quantization_config=stored)
    with pytest.raises(ModelError, match=r"mxfp4|MXFP4") as error:
        load(folder)
    assert error.value.field.startswith("quantization_config")


@pytest.mark.parametrize("scale", [129, 255])
def test_scales_that_cannot_be_packed_are_refused_by_name(folders, tmp_path, scale):
    name = "model.layers.1.mlp.experts.down_proj"
    folder = edited(folders[0], tmp_path / "m", lambda t: t[f"{name}_scales"].fill_(scale))
    with pytest.raises(ModelError, match=f"{name} cannot stay in 4 bits: .*{scale}") as error:
        load(folder, packed=True)
    assert error.value.field == "weight_dtype"


def test_copies_in_floats_cannot_stay_packed(folders):
    with pytest.raises(ModelError, match="are floats, which cannot stay packed: want auto"):
        rehearse_load(folders[1], torch.float32, packed=True)


def test_a_rehearsal_knows_the_bytes_of_packed_experts(folders):
    config, nbytes = rehearse_load(folders[0], torch.bfloat16, packed=True)
    _, of_floats = rehearse_load(folders[0], torch.bfloat16)
    sizes = [each.mlp.experts for each in load(folders[0], packed=True)._layers]
    assert isinstance(sizes[0].gate_up, Mxfp4Experts)
    packed = sum(each.gate_up.nbytes + each.down.nbytes for each in sizes)
    weights = config.shape.layers * 3 * 3 * 96 * config.shape.hidden
    assert of_floats - nbytes == 2 * weights - packed


def test_an_engine_keeps_experts_packed_if_its_settings_say_so(folders, tmp_path):
    settings = EngineSettings(
        folders[0], tmp_path, weight_dtype="packed", max_batch_tokens=64, max_running=4
    )
    made = assemble(settings, Shelf(tmp_path / "blobs"), load_model, lambda: None)
    assert made.info.quantization == "mxfp4, packed"
    layer = made.runner.model._layers[0]
    assert isinstance(layer.mlp.experts.down, Mxfp4Experts)
    assert isinstance(layer.mixer.inputs.weight, torch.Tensor)


@pytest.mark.parametrize(
    ("change", "capability", "want"),
    [
        ({}, (9, 0), True),
        ({}, (8, 0), True),
        ({}, (7, 5), False),
        ({}, None, False),
        ({"dtype": "float32"}, (9, 0), False),
        ({"weight_dtype": "fp8"}, (9, 0), False),
        ({"weight_dtype": "packed"}, None, True),
        ({"tensor_parallel": 3}, (9, 0), True),
        ({"tensor_parallel": 2}, (9, 0), False),  # 48 inputs of each expert's down_proj
    ],
)
def test_experts_stay_packed_by_default_where_gpus_have_kernels_for_them(
    folders, tmp_path, change, capability, want
):
    settings = EngineSettings(
        folders[0], tmp_path, **{"dtype": "bfloat16", "device": "cuda"} | change
    )
    assert stays_packed(settings, capability) is want
    of_floats = replace(settings, model=folders[1], weight_dtype="auto")
    assert not stays_packed(of_floats, capability)


def test_other_formats_of_4_bits_are_floats_by_default(folders, tmp_path):
    linears = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    linears["zero_point"] = True
    folder = edited(folders[0], tmp_path / "m", lambda _: None, quantization_config=linears)
    settings = EngineSettings(folder, tmp_path, dtype="bfloat16", device="cuda")
    assert not stays_packed(settings, (9, 0))
