"""An adapter's image: every matrix at its place, true ranks, the scaling inside B."""

import itertools

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lorikeet_engine.adapter_format import (
    ALIGNMENT,
    LINEARS,
    AdapterLimits,
    BaseShape,
    read_spec,
    write_blob,
)
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.kernels.lora import LoraGroup, LoraWeights, Segments, add_lora
from lorikeet_engine.residency.packing import FUSED_GROUPS, PackedLayout, pack
from tests.engine.blobs import SHAPE, Shelf, everywhere

LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 20)
UNEVEN = {(0, 0): 3, (0, 2): 5, (0, 6): 1, (1, 4): 8, (1, 5): 2}


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path)


def packed(shelf, name, dtype=torch.float32, shape=SHAPE):
    spec = read_spec(shelf.blob(name), shape, LIMITS)
    layout = PackedLayout.of(spec, shape)
    image = torch.full((layout.elements,), torch.nan, dtype=dtype)
    pack(shelf.blob(name), spec, layout, image)
    return spec, layout, image


@pytest.mark.parametrize("ranks", [everywhere(4), everywhere(7), UNEVEN, {(1, 3): 64}])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_matrix_is_where_the_layout_says_with_scaling_in_b(shelf, ranks, stored, dtype):
    # 7/3 is in no binary format: B must be scaled in float32 and rounded once.
    ref = shelf.make("x", ranks, alpha=7.0 / 3.0, dtype=stored)
    _, layout, image = packed(shelf, "x", dtype)
    shelf.check(ref, LoraWeights(image, layout.rows[None]), 0)


@pytest.mark.parametrize("ranks", [everywhere(5), UNEVEN])
def test_matrices_are_aligned_do_not_overlap_and_fill_the_image(shelf, ranks):
    shape = BaseShape("llama", 2, hidden=18, intermediate=23, heads=3, kv_heads=1, head_dim=5)
    shelf.make("odd", ranks, shape=shape)
    spec, layout, _ = packed(shelf, "odd", shape=shape)
    spans = []
    for (layer, linear), rank in ranks.items():
        a_at, b_at, got_rank = layout.rows[layer, linear].tolist()
        d_in, d_out = shape.dims(linear)
        spans += [(a_at, a_at + rank * d_in), (b_at, b_at + rank * d_out)]
        assert got_rank == rank
    spans.sort()
    assert spans[0][0] == 0
    assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
    assert all(0 <= after[0] - before[1] < ALIGNMENT for before, after in itertools.pairwise(spans))
    assert 0 <= layout.elements - spans[-1][1] < ALIGNMENT
    assert layout.elements == spec.packed_elements()


def test_the_a_matrices_of_a_fused_group_are_neighbours(shelf):
    shelf.make("x", everywhere(4))
    _, layout, _ = packed(shelf, "x")
    for group in FUSED_GROUPS:
        starts = layout.rows[1, list(group), 0].tolist()
        width = 4 * SHAPE.dims(group[0])[0]
        assert starts == [starts[0] + n * width for n in range(len(group))]
        assert layout.rows[1, group[0], 1].item() == starts[-1] + width


def test_rows_of_linears_without_weights_stay_zero_wherever_the_image_lies(shelf):
    shelf.make("x", UNEVEN)
    _, layout, _ = packed(shelf, "x")
    rows = layout.rows_at(1000)
    for layer in range(2):
        for linear in range(7):
            if (layer, linear) in UNEVEN:
                moved = layout.rows[layer, linear] + torch.tensor([1000, 1000, 0])
                assert torch.equal(rows[layer, linear], moved)
            else:
                assert rows[layer, linear].tolist() == [0, 0, 0]


def test_a_scaling_that_overflows_the_dtype_is_refused_by_tensor(shelf):
    shelf.make("loud", {(0, 1): 1}, alpha=1e6)
    with pytest.raises(AdapterRejected) as caught:
        packed(shelf, "loud", torch.float16)
    assert caught.value.field == "layers.0.k_proj.lora_B"
    packed(shelf, "loud", torch.bfloat16)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_packed_peft_adapter_adds_what_peft_adds(tmp_path, use_rslora):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
    )
    options = peft.LoraConfig(
        r=6,
        lora_alpha=11,
        use_rslora=use_rslora,
        target_modules=list(LINEARS),
        rank_pattern={"k_proj": 2},
        alpha_pattern={r"layers\.1\..*": 5},
    )
    model = peft.get_peft_model(LlamaForCausalLM(config), options)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    model.save_pretrained(tmp_path)
    write_blob(tmp_path, tmp_path / "blob")
    _, layout, image = packed(Shelf(tmp_path), "blob")
    weights = LoraWeights(image, layout.rows[None])
    segments = Segments(
        torch.tensor([0]), torch.tensor([0]), torch.tensor([5]), max_rank=layout.max_rank
    )
    for index, layer in enumerate(model.base_model.model.model.layers):
        for group in FUSED_GROUPS:
            owner = layer.self_attn if group[0] < 4 else layer.mlp
            linears = [getattr(owner, LINEARS[n]) for n in group]
            x = torch.randn(5, SHAPE.dims(group[0])[0])
            y = torch.zeros(5, sum(SHAPE.dims(n)[1] for n in group))
            widths = tuple(SHAPE.dims(n)[1] for n in group)
            add_lora(y, x, weights, segments, index, LoraGroup(group, x.shape[1], widths))
            want = torch.cat([x @ one.get_delta_weight("default").T for one in linears], dim=1)
            torch.testing.assert_close(y, want, rtol=0, atol=16 * 1.2e-7 * want.abs().max().item())
