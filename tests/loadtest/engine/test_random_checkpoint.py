"""Checkpoint of random weights that benchmarks load."""

import pytest
import torch

from loadtest.engine import random_checkpoint
from loadtest.engine.random_model import (
    AWQ,
    CONFIGS,
    GEMMA_3_12B,
    GPT_OSS_20B,
    LLAMA_3_1_8B,
    NF4,
    RandomCheckpoint,
    random_model,
    shape_of,
    write_config,
)
from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.kernels.moe.mxfp4 import Mxfp4Experts
from lorikeet_engine.kernels.w4a16 import PackedWeight
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.weight_formats.nf4 import round_to_nf4
from tests.engine.tiny_engine import CONFIG


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES", 50_000)
    folder = tmp_path / "model"
    return random_checkpoint.write_checkpoint(folder, CONFIG, torch.device("cpu"))


def test_a_checkpoint_has_several_files(checkpoint):
    assert len(list(checkpoint.glob("model-*-of-*.safetensors"))) > 2


def test_existing_files_are_not_written_again(checkpoint):
    before = {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    random_checkpoint.write_checkpoint(checkpoint, CONFIG, torch.device("cpu"))
    assert {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before


def test_numbers_depend_on_the_name_alone_and_not_on_fusion_or_rounding():
    cpu, names = torch.device("cpu"), [f"model.layers.0.self_attn.{n}.weight" for n in "qkv"]
    cuts = [Cut.whole(rows, 64) for rows in (64, 32, 32)]
    q, k, v = (
        RandomCheckpoint(cpu, torch.bfloat16).read_linear([name], [cut])
        for name, cut in zip(names, cuts, strict=True)
    )
    assert not torch.equal(k, v)
    fused = RandomCheckpoint(cpu, torch.bfloat16).read_linear(names, cuts)
    assert torch.equal(fused, torch.cat([q, k, v]))
    rounded = RandomCheckpoint(cpu, torch.bfloat16, Quantization.NF4).read_linear(names, cuts)
    assert torch.equal(rounded, torch.cat([round_to_nf4(part) for part in (q, k, v)]))
    other = RandomCheckpoint(cpu, torch.bfloat16, seed=1).read_linear(names[:1], cuts[:1])
    assert not torch.equal(q, other)


@pytest.mark.parametrize("stored", [AWQ, NF4], ids=["awq", "nf4"])
def test_linears_of_4_bits_keep_the_size_of_their_input(tmp_path, stored):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 100}
    config = LLAMA_3_1_8B | sizes | {"num_hidden_layers": 2, "quantization_config": stored}
    folder, cpu = write_config(tmp_path, config), torch.device("cpu")
    down = random_model(folder, cpu, torch.float32, 4096, packed=True)._layers[1].mlp.down
    assert isinstance(down.weight, PackedWeight)
    assert down.weight.floats().std().item() == pytest.approx(256**-0.5, rel=0.3)
    floats = random_model(folder, cpu, torch.float32, 4096)._layers[1].mlp.down
    assert isinstance(floats.weight, torch.Tensor)


def test_experts_of_4_bits_have_outputs_of_an_eighth_of_their_inputs_size(tmp_path):
    sizes = {"hidden_size": 160, "intermediate_size": 96, "vocab_size": 100, "num_local_experts": 5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    folder, cpu = write_config(tmp_path, GPT_OSS_20B | sizes | heads), torch.device("cpu")
    experts, floats = (
        random_model(folder, cpu, torch.float32, 4096, packed=packed)._layers[1].mlp.experts
        for packed in (True, False)
    )
    assert isinstance(experts.gate_up, Mxfp4Experts)
    assert (experts.gate_up.shape, experts.down.shape) == ((5, 192, 160), (5, 160, 96))
    for weight, share in ((experts.gate_up, 1), (experts.down, 1 / 8)):
        deviation = weight.floats(1).std().item()
        assert deviation == pytest.approx(share * weight.d_in**-0.5, rel=0.5)  # a power of two
    assert isinstance(floats.down, torch.Tensor)
    assert floats.down.std().item() == pytest.approx(96**-0.5 / 8, rel=0.1)


def test_a_model_with_norms_stored_minus_one_gets_norms_of_one(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 100, "head_dim": 32}
    folder = write_config(tmp_path, GEMMA_3_12B | sizes | {"num_hidden_layers": 6})
    model = random_model(folder, torch.device("cpu"), torch.float32, 4096)
    assert model.config.kv_groups.windows == (None, *[1024] * 5)
    assert torch.equal(model._norm.weight, torch.ones(64))


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_have_the_shape_of_the_model_that_is_read_from_the_folder(tmp_path, name):
    folder = write_config(tmp_path, CONFIGS[name])
    assert shape_of(CONFIGS[name]) == ModelConfig.from_folder(folder, 2048).shape


def test_queries_are_normed_to_scores_of_one_where_attention_does_not_divide_them():
    cut = Cut.whole(512)
    path = "model.layers.0.self_attn.{}_norm.weight"
    dividing = RandomCheckpoint(torch.device("cpu"), torch.float32)
    alone = RandomCheckpoint(torch.device("cpu"), torch.float32, attention_scale=1.0)
    assert (dividing.read_parts([path.format("q")], [cut]) == 1).all()
    torch.testing.assert_close(
        alone.read_parts([path.format("q")], [cut]), torch.full([512], 512**-0.5)
    )
    assert (alone.read_parts([path.format("k")], [cut]) == 1).all()


def test_a_factor_of_the_experts_sum_does_not_change_what_they_add():
    name, cut = "model.layers.1.mixer.experts.down_proj", Cut.whole(8, 64)
    shares = [
        scale
        * RandomCheckpoint(torch.device("cpu"), torch.float32, routed_scale=scale).read_linear(
            [name], [cut]
        )
        for scale in (1.0, 2.5)
    ]
    torch.testing.assert_close(*shares)
