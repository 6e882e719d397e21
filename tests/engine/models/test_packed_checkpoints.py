"""A checkpoint of 4 bits stays packed with exactly its format's values, or is refused by name."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.errors import ModelError, SettingsError
from lorikeet_engine.execution.assembly import assemble
from lorikeet_engine.kernels.lora.types import Segments
from lorikeet_engine.kernels.w4a16 import PackedWeight, StackedWeight, check_device
from lorikeet_engine.models import checkpoint
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.llama import load_model, rehearse_load
from lorikeet_engine.models.stored_tensors import SINGLE
from lorikeet_engine.settings import EngineSettings
from tests.engine.blobs import Shelf
from tests.engine.conftest import PagedTokens
from tests.engine.models.conftest import DENSE
from tests.engine.models.quantized_checkpoints import (
    INT4,
    W4A16,
    linears,
    pack_quantized,
    saved,
    write_fp8,
    write_int4,
)
from tests.engine.models.test_models import Run, assert_equal, prompt_of, random_adapter, reference
from tests.engine.pairs import pairs

CPU = torch.device("cpu")
PROMPT = prompt_of(40)
DOWN = "model.layers.1.mlp.down_proj"


def packed(folder):
    return load_model(folder, CPU, torch.float32, packed=True)


def logits(folder, model=None):
    run = Run(folder, PagedTokens(), model=model)
    run.step({"a": PROMPT})
    return run.of("a")


def written(checkpoints, tmp_path, kind="awq", family="llama", **more):
    return write_int4(checkpoints[family], tmp_path, kind, exact=True, **{**INT4[kind], **more})


@pytest.mark.parametrize(("family", "kind"), pairs(DENSE, [*INT4]))
def test_packed_integers_are_multiplied_as_the_floats_that_they_stand_for(
    wide_checkpoints, tmp_path, family, kind
):
    folder, floats = written(wide_checkpoints, tmp_path, kind, family)
    assert_equal(logits(folder, packed(folder)), logits(floats))


@pytest.mark.parametrize("kind", INT4)
def test_an_adapter_is_added_to_packed_linears(wide_checkpoints, tmp_path, kind):
    folder, floats = written(wide_checkpoints, tmp_path, kind, "qwen3")
    shape = ModelConfig.from_folder(folder).shape
    lora, merged = random_adapter(shape, rank=3)
    run = Run(folder, PagedTokens(), lora=lora, model=packed(folder))
    segments = Segments(*(torch.tensor([n], dtype=torch.int32) for n in (0, 0, 40)), max_rank=3)
    got = run.runner.forward(replace(run.tokens.batch({"a": PROMPT}), segments=segments))
    assert_equal(got, reference(floats, PROMPT, merged))


def test_linears_of_one_order_are_one_weight_and_others_stay_apart(wide_checkpoints, tmp_path):
    for kind, whole in (("gptq_shared", True), ("gptq", False), ("awq", True)):
        folder, _ = written(wide_checkpoints, tmp_path / kind, kind)
        weight = packed(folder)._layers[0].mixer.inputs.weight
        assert isinstance(weight, PackedWeight if whole else StackedWeight)


def test_linears_that_are_not_quantised_stay_floats_beside_packed_ones(wide_checkpoints, tmp_path):
    folder, floats = written(wide_checkpoints, tmp_path)
    tensors, plain = load_file(folder / SINGLE), load_file(floats / SINGLE)
    for path in (DOWN, "model.layers.0.self_attn.k_proj"):
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{path}.{part}"]
        tensors[f"{path}.weight"] = plain[f"{path}.weight"]
    save_file(tensors, folder / SINGLE)
    model = packed(folder)
    assert_equal(logits(folder, model), logits(floats))
    kinds = [type(part) for part in model._layers[0].mixer.inputs.weight.parts]
    assert kinds == [PackedWeight, torch.Tensor, PackedWeight]
    assert isinstance(model._layers[1].mlp.down.weight, torch.Tensor)


@pytest.mark.parametrize("kind", INT4)
def test_a_rehearsal_knows_the_bytes_of_packed_weights(wide_checkpoints, tmp_path, kind):
    folder, _ = written(wide_checkpoints, tmp_path, kind)
    config, nbytes = rehearse_load(folder, torch.bfloat16, packed=True)
    with Checkpoint(folder, CPU, torch.bfloat16, config.quantized_linears, packed=True) as read:
        weight = read.read_fused([f"{DOWN}.weight"], [Cut.whole(64, 128)], 0)
    ordered = 4 * 128 * ("gptq" in kind or "ordered" in kind)
    assert weight.nbytes == read.nbytes == 64 * 128 // 2 + 64 * 4 * (2 + 1) + ordered
    assert nbytes < rehearse_load(folder, torch.bfloat16)[1]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["awq", "w4a16"])
def test_each_process_reads_its_part_of_packed_linears(wide_checkpoints, tmp_path, kind, ranks):
    folder, floats = written(wide_checkpoints, tmp_path, kind)
    stored = ModelConfig.from_folder(folder).quantized_linears
    values = load_file(floats / SINGLE)[f"{DOWN}.weight"]
    for rank in range(ranks):
        kept = range(rank * 128 // ranks, (rank + 1) * 128 // ranks)
        with Checkpoint(folder, CPU, torch.float32, stored, packed=True) as read:
            weight = read.read_fused([f"{DOWN}.weight"], [Cut((64, 128), range(64), kept)], 0)
        assert torch.equal(weight.floats(), values[:, kept.start : kept.stop])


def test_inputs_in_the_order_of_act_order_are_not_divided(wide_checkpoints, tmp_path):
    folder, _ = written(wide_checkpoints, tmp_path, "gptq")
    stored = ModelConfig.from_folder(folder).quantized_linears
    cut = Cut((64, 128), range(64), range(64))
    read = Checkpoint(folder, CPU, torch.float32, stored, packed=True)
    said = pytest.raises(ModelError, match=r"act-order.*another number of GPUs.*auto")
    with read, said:
        read.read_fused([f"{DOWN}.weight"], [cut], 0)


@pytest.mark.parametrize("group", [8, 16])
def test_groups_of_few_inputs_are_refused_and_served_as_floats(wide_checkpoints, tmp_path, group):
    folder, _ = written(wide_checkpoints, tmp_path, group=group, group_size=group)
    with pytest.raises(ModelError, match=r"no multiples of 32 each: want weight_dtype=auto"):
        packed(folder)
    with pytest.raises(ModelError, match="no multiples of 32 each"):
        rehearse_load(folder, torch.float32, packed=True)
    assert logits(folder).isfinite().all()


@pytest.mark.parametrize("kind", ["floats", "dynamic"])
def test_a_checkpoint_without_4_bits_cannot_stay_packed(tiny_checkpoints, tmp_path, kind):
    folder = tiny_checkpoints["llama"]
    if kind != "floats":
        folder, _ = write_fp8(folder, tmp_path, kind)
    with pytest.raises(ModelError, match="which cannot stay packed: want auto") as refused:
        rehearse_load(folder, torch.float32, packed=True)
    assert refused.value.field == "weight_dtype"


def test_an_engine_keeps_weights_packed_if_its_settings_say_so(wide_checkpoints, tmp_path):
    folder, floats = written(wide_checkpoints, tmp_path)
    settings = EngineSettings(
        folder, tmp_path, weight_dtype="packed", max_batch_tokens=64, max_running=4
    )
    made = assemble(settings, Shelf(tmp_path / "blobs"), load_model, lambda: None)
    assert made.info.quantization == "awq, packed"
    assert isinstance(made.runner.model._layers[0].mlp.down.weight, PackedWeight)
    assert_equal(logits(folder, made.runner.model), logits(floats))


def test_too_little_memory_for_floats_suggests_packed(wide_checkpoints, tmp_path, monkeypatch):
    folder, _ = written(wide_checkpoints, tmp_path)
    monkeypatch.setattr(checkpoint, "free_bytes", lambda _: 100)
    with pytest.raises(SettingsError, match="weight_dtype=packed"):
        load_model(folder, CPU, torch.float32)
    with pytest.raises(SettingsError, match="want a smaller model, or a larger device"):
        packed(folder)


def test_integers_of_compressed_tensors_without_zero_points_have_8(wide_checkpoints, tmp_path):
    plain = wide_checkpoints["llama"]
    names, tensors = linears(plain)
    floats = dict(tensors)
    for name in names:
        d_out, d_in = tensors.pop(name).shape
        q = torch.randint(16, (d_in, d_out))
        scales = (torch.rand(1, d_out) / 20).bfloat16()
        made = pack_quantized(name.removesuffix(".weight"), q, torch.zeros(1, d_out), scales)
        tensors |= {key: each for key, each in made.items() if "zero" not in key}
        floats[name] = ((q - 8) * scales.float()).t()
    config = copy.deepcopy(W4A16)
    config["config_groups"]["group_0"]["weights"] |= {
        "strategy": "channel", "group_size": None, "symmetric": True,
    }  # fmt: skip
    folder = saved(plain, tmp_path / "packed", tensors, quantization_config=config)
    want = logits(saved(plain, tmp_path / "floats", floats))
    assert_equal(logits(folder, packed(folder)), want)
    rounded = {name: floats[name].bfloat16().float() for name in names}
    assert torch.equal(logits(folder), logits(saved(plain, tmp_path / "r", floats | rounded)))


def test_an_order_of_inputs_that_was_never_set_is_none(wide_checkpoints, tmp_path):
    folder, floats = written(wide_checkpoints, tmp_path, "w4a16")
    tensors = load_file(folder / SINGLE)
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        unset = torch.full((8 * tensors[name].shape[1],), -1, dtype=torch.int32)
        tensors[name.replace("packed", "g_idx")] = unset
    save_file(tensors, folder / SINGLE)
    assert_equal(logits(folder, packed(folder)), logits(floats))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": "marlin-24"}, "config_groups.group_0.format"),
        ({"weights": {"num_bits": 8}}, "config_groups.group_0.weights"),
        ({"weights": {"strategy": "tensor"}}, "strategy"),
        ({"weights": {"group_size": 0}}, "group_size"),
        ({"input_activations": {"num_bits": 8, "type": "int"}}, "input_activations"),
    ],
)
def test_other_packed_formats_of_compressed_tensors_are_refused(edited, change, field):
    config = copy.deepcopy(W4A16)
    group = config["config_groups"]["group_0"]
    weights = group["weights"] | change.get("weights", {})
    group |= change | {"weights": weights}
    with pytest.raises(ModelError, match="quantization_config") as refused:
        ModelConfig.from_folder(edited("llama", quantization_config=config))
    assert field in refused.value.field


def test_a_gpu_before_ampere_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(SettingsError, match=r"8.0 or above .*has 7.5: want weight_dtype=auto"):
        check_device(torch.device("cuda", 0))
