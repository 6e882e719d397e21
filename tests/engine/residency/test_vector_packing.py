"""Packed gains and biases make every linear compute what PEFT's module computes."""

import copy
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lorikeet_engine.adapter_format import AdapterLimits, BaseShape, read_spec, write_blob
from lorikeet_engine.adapter_format.families import Parallel
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.kernels.lora.reference import add_lora
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights, Segments
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.residency.base_rows import RowFacts
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.packed_image import PackedImage, PackedLayout

LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 20)
CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=36,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    attention_bias=True,
    mlp_bias=True,
)
SHAPE = BaseShape.from_config(CONFIG.to_dict() | {"rope_parameters": None})
KINDS = {
    "DoRA": {"use_dora": True},
    "DoRA with trained biases": {"use_dora": True, "bias": "all"},
    "a bias of B": {"lora_bias": True},
    "trained biases": {"bias": "lora_only"},
    "all biases": {"bias": "all", "lora_bias": True},
}


class Rows:
    """BaseRows of a model of transformers, divided among ranks."""

    def __init__(self, model, world: int) -> None:
        self.model = model
        self.ranges = [Shard(rank, world).ranges(SHAPE) for rank in range(world)]

    def part(self, rank, layer, linear):
        """Weight and bias that a rank keeps; no bias where another rank adds it."""
        module = self.model.get_submodule(SHAPE.linears[linear].path(layer))
        kept = self.ranges[rank][linear]
        rows = torch.cat([torch.arange(some.start, some.stop) for some in kept.outputs])
        weight = module.weight.detach()[rows][:, kept.inputs.start : kept.inputs.stop]
        adds = rank == 0 or SHAPE.linears[linear].parallel is not Parallel.ROW
        return weight, module.bias.detach()[rows] if adds else None

    def facts(self, rank, layer, linear, a=None, b=None):
        weight, bias = self.part(rank, layer, linear)
        return RowFacts(None if a is None else (weight + b.T @ a).square().sum(1), bias)


@pytest.fixture
def base():
    torch.manual_seed(2)
    model = LlamaForCausalLM(copy.deepcopy(CONFIG))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    return model


@pytest.fixture
def saved(base, tmp_path):
    """Save an adapter with PEFT; return a function that does so and gives PEFT's model."""

    def save(**options):
        config = peft.LoraConfig(
            r=5, lora_alpha=7, target_modules=["q_proj", "o_proj", "down_proj"], **options
        )
        model = peft.get_peft_model(copy.deepcopy(base), config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / "peft")
        write_blob(tmp_path / "peft", tmp_path / "blob")
        return model

    return save


def image_of(blob, base, world=1, dtype=torch.float32):
    spec = read_spec(blob, SHAPE, LIMITS)
    layout, rows = PackedLayout.of(spec, SHAPE, world), Rows(base, world)
    elements = torch.full((layout.image_elements,), torch.nan, dtype=dtype)
    return PackedImage(layout, elements, pack(blob, spec, layout, elements, rows)), rows


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_each_linear_computes_as_pefts_module(kind, world, base, saved, tmp_path):
    model = saved(**KINDS[kind])
    image, rows = image_of(tmp_path / "blob", base, world)
    with_vectors, x = 0, torch.randn(3, max(SHAPE.hidden, SHAPE.intermediate))
    for layer in range(SHAPE.layers):
        for index, linear in enumerate(SHAPE.linears):
            inputs = x[:, : SHAPE.dims(index)[0]]
            module = model.get_submodule(f"base_model.model.{linear.path(layer)}")
            with torch.inference_mode():
                want = module(inputs)
            got = [
                computed(image, rows, rank, layer, index, inputs).clone() for rank in range(world)
            ]
            joined = sum(got) if linear.parallel is Parallel.ROW else torch.cat(got, 1)
            torch.testing.assert_close(joined, want, rtol=1e-5, atol=1e-5)
            with_vectors += int(image.layout.vectors[layer, index] >= 0)
    assert with_vectors == 2 * (7 if "all" in KINDS[kind].values() else 3)


def computed(image, rows, rank, layer, index, x):
    """A rank's part of a linear's output: the base model's product, and the adapter in one slot."""
    weight, bias = rows.part(rank, layer, index)
    kept = rows.ranges[rank][index]
    x = x[:, kept.inputs.start : kept.inputs.stop]
    y = x @ weight.T if bias is None else x @ weight.T + bias
    layout = image.layout
    weights = LoraWeights(image.span(rank), layout.rows[None], layout.vectors[None])
    run = torch.tensor([0], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    segments = Segments(*run, torch.tensor([len(x)], dtype=torch.int32), 5, has_vectors=True)
    add_lora(y, x, weights, segments, layer, LoraGroup((index,), x.shape[1], (kept.d_out,)))
    return y


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_has_the_size_that_its_spec_says(kind, world, saved, tmp_path):
    saved(**KINDS[kind])
    spec = read_spec(tmp_path / "blob", SHAPE, LIMITS)
    kept = Shard(0, world).ranges(SHAPE)
    elements = spec.packed_elements(lambda n: kept[n].dims)
    assert elements == PackedLayout.of(spec, SHAPE, world).elements
    assert elements > replace(spec, vectors=()).packed_elements(lambda n: kept[n].dims)


def test_trained_vectors_count_among_the_parameters(saved, tmp_path):
    model = saved(use_dora=True)
    spec = read_spec(tmp_path / "blob", SHAPE, LIMITS)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert spec.touches.parameters == trained


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.float16, 1e6), (torch.float32, torch.inf), (torch.bfloat16, torch.nan)],
)
def test_a_vector_that_does_not_fit_the_image_is_refused(dtype, factor, base, saved, tmp_path):
    saved(use_dora=True)
    change(tmp_path, lambda name, tensor: tensor * (factor if "magnitude" in name else 1))
    with pytest.raises(AdapterRejected, match="lora_magnitude_vector does not fit"):
        image_of(tmp_path / "blob", base, dtype=dtype)


def test_a_row_of_zeros_has_no_norm_to_scale(base, saved, tmp_path):
    saved(use_dora=True)
    base.get_submodule("model.layers.1.mlp.down_proj").weight.data[3] = 0.0
    change(tmp_path, lambda name, tensor: tensor * (0 if "down_proj.lora_B" in name else 1))
    with pytest.raises(AdapterRejected, match=r"layers\.1\.down_proj"):
        image_of(tmp_path / "blob", base)


def change(folder, changed):
    """Write the blob of PEFT's folder again, with changed tensors."""
    path = folder / "peft/adapter_model.safetensors"
    save_file({name: changed(name, tensor) for name, tensor in load_file(path).items()}, path)
    write_blob(folder / "peft", folder / "blob")
