"""A quantized checkpoint is served with its exact values, or refused by the name of what is not."""

import json
from dataclasses import replace

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import BaseShape, Quantization
from lorikeet_engine.errors import ModelError
from lorikeet_engine.execution.assembly import assemble
from lorikeet_engine.kernels.lora.types import Segments
from lorikeet_engine.models import checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.llama import load_model, rehearse_load
from lorikeet_engine.models.stored_tensors import SINGLE
from lorikeet_engine.models.weight_formats.nf4 import Nf4, round_to_nf4
from lorikeet_engine.settings import EngineSettings
from tests.engine.blobs import Shelf
from tests.engine.conftest import PagedTokens
from tests.engine.models.conftest import DENSE
from tests.engine.models.quantized_checkpoints import (
    AWQ,
    GPTQ,
    NF4,
    gptq,
    linears,
    saved,
    write_int4,
)
from tests.engine.models.test_models import Run, assert_equal, prompt_of, random_adapter, reference
from tests.engine.pairs import pairs

CPU = torch.device("cpu")
PROMPT = prompt_of(40)


def logits(folder, model=None):
    run = Run(folder, PagedTokens(), model=model)
    run.step({"a": PROMPT})
    return run.of("a")


@pytest.mark.parametrize(("family", "double"), pairs(DENSE, [True, False]))
def test_an_nf4_checkpoint_gives_the_logits_of_bitsandbytes_packed_or_not(nf4, family, double):
    model, folder = nf4(family, double)
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT])).logits[0]
    for packed in (False, True):
        served = load_model(folder, CPU, torch.float32, packed=packed)
        assert_equal(logits(folder, served), want)


def test_an_adapter_is_added_to_the_exact_values_of_an_nf4_base(nf4, wide_checkpoints, tmp_path):
    model, folder = nf4("qwen3")
    names, tensors = linears(wide_checkpoints["qwen3"])
    for name in names:
        weight = model.get_parameter(name)
        tensors[name] = dequantize_4bit(weight.data, weight.quant_state)
    plain = saved(wide_checkpoints["qwen3"], tmp_path / "plain", tensors)
    shape = BaseShape.from_config(json.loads((folder / "config.json").read_text()))
    lora, merged = random_adapter(shape, rank=3)
    run = Run(folder, PagedTokens(), lora=lora)
    segments = Segments(*(torch.tensor([n], dtype=torch.int32) for n in (0, 0, 40)), max_rank=3)
    got = run.runner.forward(replace(run.tokens.batch({"a": PROMPT}), segments=segments))
    assert_equal(got, reference(plain, PROMPT, merged))


def test_a_linear_whose_rows_are_reordered_is_dequantised_once(nf4, wide_checkpoints, monkeypatch):
    _, folder = nf4("qwen3_5_text")
    read, rounded, dequantize = [], [], Nf4.dequantize

    def watched(self, name, shape, parts):
        read.append(name)
        return dequantize(self, name, shape, parts)

    def watched_rounding(weight):
        rounded.append(weight)
        return round_to_nf4(weight)

    monkeypatch.setattr(Nf4, "dequantize", watched)
    monkeypatch.setattr(checkpoint, "round_to_nf4", watched_rounding)
    stored = [n for n in load_file(folder / SINGLE) if n.endswith(".quant_map")]
    load_floats(folder, torch.float32)
    load_model(wide_checkpoints["qwen3_5_text"], CPU, torch.float32, rounding=Quantization.NF4)
    assert len(read) == len(rounded) == 2 * len(stored)  # once on the meta device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(96, 64), (40, 192)], ids=["even", "odd"])
def test_a_weight_rounded_to_nf4_equals_bitsandbytes(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4", compress_statistics=True))
    got = round_to_nf4(weight)
    assert got.dtype == dtype
    # its search for the nearest of 256 levels errs one time in a thousand, for a block of 64
    assert (got != want).sum() <= 64
    torch.testing.assert_close(got, want, rtol=0.02, atol=0)


def test_a_checkpoint_of_floats_can_be_served_as_if_it_were_nf4(wide_checkpoints, tmp_path):
    folder = wide_checkpoints["qwen2"]
    names, tensors = linears(folder)
    rounded = {name: round_to_nf4(tensors[name]) for name in names}
    want = saved(folder, tmp_path / "rounded", tensors | rounded)
    assembly = assembled(folder, tmp_path)
    assert assembly.info.quantization == "rounded to nf4"
    model = assembly.runner.model
    assert torch.equal(logits(folder, model), logits(want))


def test_a_quantised_checkpoint_is_not_rounded_to_nf4_again(nf4, tmp_path):
    with pytest.raises(ModelError, match="quantised already, as nf4"):
        assembled(nf4("llama")[1], tmp_path)


def test_the_exact_values_of_an_nf4_checkpoint_can_be_rounded_to_fp8_on_top(
    nf4, wide_checkpoints, tmp_path
):
    model, folder = nf4("llama")
    names, tensors = linears(wide_checkpoints["llama"])
    for name in names:
        weight = model.get_parameter(name)
        tensors[name] = dequantize_4bit(weight.data, weight.quant_state)
    plain = saved(wide_checkpoints["llama"], tmp_path / "plain", tensors)
    got, want = (
        logits(source, assembled(source, tmp_path, "fp8").runner.model)
        for source in (folder, plain)
    )
    assert torch.equal(got, want)


def assembled(folder, tmp_path, weight_dtype="nf4"):
    settings = EngineSettings(
        folder, tmp_path, weight_dtype=weight_dtype, max_batch_tokens=64, max_running=4
    )
    return assemble(settings, Shelf(tmp_path / "blobs"), load_model, lambda: None)


INTEGERS = {"awq": AWQ, "gptq": GPTQ, "gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2"}}


@pytest.mark.parametrize(("family", "kind"), pairs(DENSE, [*INTEGERS]))
def test_integers_stand_for_the_floats_of_their_scales(wide_checkpoints, tmp_path, family, kind):
    folder, floats = write_int4(wide_checkpoints[family], tmp_path, kind, **INTEGERS[kind])
    assert torch.equal(logits(folder), logits(floats))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gptq_v2", GPTQ | {"checkpoint_format": "GPTQ_V2"}),
        ("gptq_v2", GPTQ | {"format": "gptq_v2"}),
        ("awq", {**{k: v for k, v in AWQ.items() if k != "version"}, "format": "gemm"}),
    ],
    ids=["capitals", "gptqmodel", "gptqmodel_awq"],
)
def test_the_version_of_a_format_has_several_names(tiny_checkpoints, tmp_path, kind, config):
    folder, floats = write_int4(tiny_checkpoints["llama"], tmp_path, kind, **config)
    assert torch.equal(logits(folder), logits(floats))


def test_scales_of_bfloat16_that_gptqmodel_keeps_give_values_of_bfloat16(
    tiny_checkpoints, tmp_path
):
    folder, floats = write_int4(
        tiny_checkpoints["llama"], tmp_path, "awq", dtype=torch.bfloat16, **AWQ
    )
    assert torch.equal(logits(folder), logits(floats))


@pytest.mark.parametrize("group", [-1, 2])
def test_an_input_of_a_group_that_is_not_there_is_refused(tiny_checkpoints, tmp_path, group):
    folder, _ = write_int4(tiny_checkpoints["llama"], tmp_path, "gptq", **GPTQ)
    tensors, name = load_file(folder / SINGLE), "model.layers.1.self_attn.o_proj.g_idx"
    tensors[name][5] = group
    save_file(tensors, folder / SINGLE)
    with pytest.raises(ModelError, match="groups that are not there: want 0 to 1") as refused:
        load_floats(folder, torch.float32)
    assert refused.value.field == name


def test_a_lm_head_that_is_quantised_gets_its_values(tiny_checkpoints, tmp_path):
    plain = tiny_checkpoints["llama"]
    folder, floats = write_int4(plain, tmp_path, "gptq", **GPTQ)
    tensors, wanted = load_file(folder / SINGLE), load_file(floats / SINGLE)
    d_out, d_in = tensors.pop("lm_head.weight").shape
    q, group_of = torch.randint(16, (d_in, d_out)), torch.arange(d_in) // 32
    zeros, scales = torch.full((2, d_out), 8), torch.full((2, d_out), 0.01).half()
    tensors |= gptq("lm_head", q, zeros, scales, group_of)
    wanted["lm_head.weight"] = ((q - 8).half() * scales[0]).t()
    config = {"quantization_config": GPTQ | {"lm_head": True}}
    got, want = (
        saved(plain, tmp_path / "a", tensors, **config),
        saved(plain, tmp_path / "b", wanted),
    )
    assert torch.equal(logits(got), logits(want))


def test_a_quantised_lm_head_beside_tied_embeddings_is_left_unread(tiny_checkpoints, tmp_path):
    tied = tiny_checkpoints["tied"]
    folder, _ = write_int4(tied, tmp_path, "gptq", **GPTQ)
    q, zeros = torch.randint(16, (64, 256)), torch.full((2, 256), 8)
    scales, group_of = torch.full((2, 256), 0.01).half(), torch.arange(64) // 32
    tensors = load_file(folder / SINGLE) | gptq("lm_head", q, zeros, scales, group_of)
    config = {"quantization_config": GPTQ | {"lm_head": True}}
    other = saved(tied, tmp_path / "other", tensors, **config)
    assert torch.equal(logits(other), logits(folder))


def test_quantised_linears_that_config_json_does_not_mention_are_named(tiny_checkpoints, tmp_path):
    folder, _ = write_int4(tiny_checkpoints["llama"], tmp_path, "awq", **AWQ)
    unsaid = saved(tiny_checkpoints["llama"], tmp_path / "unsaid", load_file(folder / SINGLE))
    with pytest.raises(ModelError, match=r"q_proj.qweight, .* want config.json to say"):
        rehearse_load(unsaid, torch.float32)


@pytest.mark.parametrize(
    "config",
    [NF4, AWQ, GPTQ, {"quant_method": "fp8"}],
    ids=["nf4", "awq", "gptq", "fp8"],
)
def test_floats_that_config_json_calls_quantised_are_refused(edited, config):
    folder = edited("llama", quantization_config=config)
    with pytest.raises(ModelError, match="no linear is stored so: take it out of") as refused:
        rehearse_load(folder, torch.float32)
    assert refused.value.field.startswith("quantization_config")


def test_biases_of_zeros_that_autogptq_adds_are_no_obstacle_and_others_are(
    tiny_checkpoints, tmp_path
):
    folder, floats = write_int4(tiny_checkpoints["llama"], tmp_path, "gptq", **GPTQ)
    tensors = load_file(folder / SINGLE)
    name = "model.layers.1.mlp.down_proj.bias"
    tensors[name] = torch.zeros(64, dtype=torch.float16)
    config = {"quantization_config": GPTQ}
    with_zeros = saved(folder, tmp_path / "zeros", tensors, **config)
    assert torch.equal(logits(with_zeros), logits(floats))
    tensors[name][3] = 1.0
    with pytest.raises(ModelError, match=name):
        logits(saved(folder, tmp_path / "ones", tensors, **config))


def test_one_group_can_hold_all_inputs(tiny_checkpoints, tmp_path):
    names, tensors = linears(tiny_checkpoints["llama"])
    for name in names:
        d_out, d_in = tensors.pop(name).shape
        q = torch.randint(16, (d_in, d_out))
        part = torch.full((1, d_out), 8), torch.full((1, d_out), 0.01).half()
        tensors |= gptq(name.removesuffix(".weight"), q, *part, torch.zeros(d_in))
    config = GPTQ | {"group_size": -1}
    folder = saved(tiny_checkpoints["llama"], tmp_path / "a", tensors, quantization_config=config)
    assert logits(folder).isfinite().all()


def test_a_rehearsal_knows_the_bytes_of_dequantised_weights(nf4, wide_checkpoints, tmp_path):
    plain = rehearse_load(wide_checkpoints["llama"], torch.bfloat16)[1]
    assert rehearse_load(nf4("llama")[1], torch.bfloat16)[1] == plain
    folder, _ = write_int4(wide_checkpoints["llama"], tmp_path, "awq", **AWQ)
    assert rehearse_load(folder, torch.bfloat16)[1] == plain


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "torchao"}, "quant_method"),
        ("4 bits", "quant_method"),
        (NF4 | {"load_in_4bit": False, "load_in_8bit": True}, "load_in_4bit"),
        (NF4 | {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type"),
        (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        (AWQ | {"version": "gemv"}, "version"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (AWQ | {"group_size": 0}, "group_size"),
        (GPTQ | {"bits": 8}, "bits"),
        (GPTQ | {"rotation": "hadamard"}, "rotation"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format"),
    ],
)
def test_other_formats_are_refused_by_name(edited, quantization, field):
    with pytest.raises(ModelError, match=f"quantization_config.{field}") as refused:
        ModelConfig.from_folder(edited("llama", quantization_config=quantization))
    assert refused.value.field == f"quantization_config.{field}"


@pytest.mark.parametrize(
    ("part", "spoil"),
    [
        (".quant_map", lambda tensor: tensor[:-1]),
        (".absmax", lambda tensor: tensor[:-1]),
        (".nested_absmax", lambda tensor: tensor.half()),
        (".quant_state.bitsandbytes__nf4", lambda tensor: tensor[1:]),
        ("", lambda tensor: tensor[:-1]),
    ],
)
def test_a_part_that_does_not_fit_is_named(nf4, tmp_path, part, spoil):
    name = f"model.layers.1.mlp.up_proj.weight{part}"
    _, folder = nf4("llama")
    tensors = load_file(folder / SINGLE)
    tensors[name] = spoil(tensors[name])
    for load in (load_floats, rehearse_load):
        with pytest.raises(ModelError, match=name.replace(".", r"\.")) as refused:
            load(saved(folder, tmp_path / load.__name__, tensors), torch.float32)
        assert refused.value.field == name


def load_floats(folder, dtype):
    return load_model(folder, CPU, dtype)
