"""Packing: every matrix at its offset, true ranks, the scaling in B."""

import dataclasses
import itertools
import random

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from lorikeet_engine.adapter_format import (
    ALIGNMENT,
    AdapterLimits,
    BaseShape,
    read_spec,
    write_blob,
)
from lorikeet_engine.adapter_format.header import header_bytes, read_header
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.kernels.lora.reference import add_lora
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights, Segments
from lorikeet_engine.residency import blob_packing
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.checksums import layer_sums
from lorikeet_engine.residency.packed_image import PackedImage, PackedLayout
from tests.engine.blobs import SHAPE, Shelf, everywhere

LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 20)
OUTER = {(SHAPE.outer_layer, SHAPE.index(name)): 6 for name in ("lm_head", "embed_tokens")}
UNEVEN = {(0, 0): 3, (0, 2): 5, (0, 6): 1, (1, 4): 8, (1, 5): 2}


def packed(shelf, name, dtype=torch.float32, shape=SHAPE, world=1):
    spec = read_spec(shelf.blob(name), shape, LIMITS)
    layout = PackedLayout.of(spec, shape, world)
    image = torch.full((layout.image_elements,), torch.nan, dtype=dtype)
    pack(shelf.blob(name), spec, layout, image)
    return spec, layout, image


@pytest.mark.parametrize("ranks", [everywhere(4), everywhere(7), UNEVEN, {(1, 3): 64}])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_matrix_is_where_the_layout_says_with_scaling_in_b(shelf, ranks, stored, dtype):
    # 7/3 is not exact in binary: B must be scaled in float32 and rounded once.
    ref = shelf.make("x", ranks, alpha=7.0 / 3.0, dtype=stored)
    _, layout, image = packed(shelf, "x", dtype)
    shelf.check(ref, LoraWeights(image, layout.rows[None]), 0)


@pytest.mark.parametrize("ranks", [everywhere(5), UNEVEN, UNEVEN | OUTER])
def test_matrices_are_aligned_do_not_overlap_and_fill_the_image(shelf, ranks):
    shape = BaseShape(
        "llama", 2, hidden=18, intermediate=23, heads=3, kv_heads=1, head_dim=5, vocabulary=40
    )
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
    assert layout.elements == spec.packed_elements(shape.dims)


def test_the_a_matrices_of_a_fused_group_are_neighbours(shelf):
    shelf.make("x", everywhere(4))
    _, layout, _ = packed(shelf, "x")
    for group in SHAPE.groups.values():
        starts = layout.rows[1, list(group), 0].tolist()
        width = 4 * SHAPE.dims(group[0])[0]
        assert starts == [starts[0] + n * width for n in range(len(group))]
        assert layout.rows[1, group[0], 1].item() == starts[-1] + width


@pytest.mark.parametrize("ranks", [everywhere(4), UNEVEN | OUTER, {(1, 3): 4}, {(0, 6): 4}, OUTER])
def test_each_layer_lies_between_its_offset_and_the_next(shelf, ranks):
    shelf.make("x", ranks)
    _, layout, _ = packed(shelf, "x")
    ends = (*layout.layers[1:], layout.elements)
    for layer, (begin, end) in enumerate(zip(layout.layers, ends, strict=True)):
        used = [linear for at, linear in ranks if at == layer]
        starts = layout.rows[layer, used, :2]
        assert all(begin <= start < end for start in starts.flatten().tolist())
        assert (begin == end) == (not used)


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


def matrices(layout, image, layer, linear, rank=0):
    """A [rows, d_in] and transposed B [rank, d_out] of a rank's span."""
    a_at, b_at, lora_rank = layout.rows[layer, linear].tolist()
    kept, span = layout.ranges[rank][linear], image.split(layout.elements)[rank]
    a_elements, b_elements = kept.elements(lora_rank)
    a, b = span[a_at : a_at + a_elements], span[b_at : b_at + b_elements]
    if linear == SHAPE.index("embed_tokens"):
        return a.view(len(kept.inputs), -1), b.view(lora_rank, -1)
    return a.view(-1, len(kept.inputs)), b.view(lora_rank, -1)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("ranks", [everywhere(8), everywhere(7), UNEVEN, UNEVEN | OUTER])
def test_each_span_holds_its_ranks_part_in_the_same_layout(shelf, world, ranks):
    shape = BaseShape(
        "llama", 2, hidden=24, intermediate=20, heads=4, kv_heads=2, head_dim=5, vocabulary=43
    )
    shelf.make("x", ranks, shape=shape)
    _, *whole = packed(shelf, "x", shape=shape)
    _, layout, image = packed(shelf, "x", shape=shape, world=world)
    assert len(image) == world * layout.elements
    runs = {2: [24, 19], 4: [16, 16, 11, 0]}[world]  # of the vocabulary, by multiples of 8
    for (layer, linear), lora_rank in ranks.items():
        a, b = matrices(*whole, layer, linear)
        assert layout.rows[layer, linear, 2] == lora_rank
        for rank in range(world):
            want_a, want_b = a, b
            if linear in (3, 6):  # o, down
                want_a = a.chunk(world, dim=1)[rank]
            elif linear == shape.index("lm_head"):
                want_b = b.split(runs, dim=1)[rank]
            elif linear != shape.index("embed_tokens"):
                # Four ranks share two heads of k and of v: each head is in two of them.
                pieces = min(world, shape.kv_heads) if linear in (1, 2) else world
                want_b = b.chunk(pieces, dim=1)[rank * pieces // world]
            got_a, got_b = matrices(layout, image, layer, linear, rank)
            assert torch.equal(got_a, want_a)
            assert torch.equal(got_b, want_b)


def test_linears_that_are_stored_as_one_are_divided_separately(shelf):
    shape = BaseShape("phi3", 1, 24, 20, heads=4, kv_heads=2, head_dim=4, vocabulary=43)
    shelf.make("x", {(0, 0): 3, (0, 2): 5}, shape=shape)
    _, *whole = packed(shelf, "x", shape=shape)
    _, layout, image = packed(shelf, "x", shape=shape, world=2)
    for linear, widths in {0: [16, 8, 8], 2: [20, 20]}.items():
        a, b = matrices(*whole, 0, linear)
        for rank in range(2):
            got_a, got_b = matrices(layout, image, 0, linear, rank)
            assert torch.equal(got_a, a)
            parts = [part.chunk(2, dim=1)[rank] for part in b.split(widths, dim=1)]
            assert torch.equal(got_b, torch.cat(parts, dim=1))


@pytest.mark.parametrize("ranks", [everywhere(5), UNEVEN])
def test_a_span_is_aligned_and_as_small_as_its_matrices(shelf, ranks):
    shape = BaseShape(
        "llama", 2, hidden=18, intermediate=22, heads=2, kv_heads=1, head_dim=5, vocabulary=40
    )
    shelf.make("odd", ranks, shape=shape)
    _, layout, _ = packed(shelf, "odd", shape=shape, world=2)
    spans = []
    for (layer, linear), rank in ranks.items():
        sizes = layout.ranges[1][linear].elements(rank)
        starts = layout.rows[layer, linear, :2].tolist()
        spans += [(at, at + size) for at, size in zip(starts, sizes, strict=True)]
    spans.sort()
    assert spans[0][0] == 0
    assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
    assert all(0 <= after[0] - before[1] < ALIGNMENT for before, after in itertools.pairwise(spans))
    assert 0 <= layout.elements - spans[-1][1] < ALIGNMENT


def test_an_image_has_the_sums_of_each_span(shelf):
    shape = dataclasses.replace(SHAPE, kv_heads=2)
    shelf.make("y", everywhere(3), shape=shape)
    spec = read_spec(shelf.blob("y"), shape, LIMITS)
    layout = PackedLayout.of(spec, shape, 2)
    elements = torch.zeros(layout.image_elements)
    image = PackedImage(layout, elements, pack(shelf.blob("y"), spec, layout, elements))
    for rank in range(2):
        assert image.span_sums(rank) == layer_sums(image.span(rank), layout.layers)
    assert image.span_sums(0) != image.span_sums(1)


TWELVE_LAYERS = dataclasses.replace(SHAPE, layers=12)
ALIKE = {(layer, linear): 4 for layer in range(12) for linear in range(7)}


class CallCounter(TorchDispatchMode):
    """Counts calls into torch, each of which releases the interpreter lock."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_like_layers_are_packed_with_few_calls_each(shelf):
    calls = []
    for layers in (2, 12):
        shape = dataclasses.replace(SHAPE, layers=layers)
        ranks = {place: rank for place, rank in ALIKE.items() if place[0] < layers}
        shelf.make(f"x{layers}", ranks, shape=shape, dtype=torch.bfloat16)
        with CallCounter() as counter:
            packed(shelf, f"x{layers}", torch.bfloat16, shape)
        calls.append(counter.calls)
    assert calls[1] - calls[0] < 10 * 30  # of ten layers more; one by one it would be 200 each


@pytest.mark.parametrize("ranks", [ALIKE, {**ALIKE, (3, 1): 5}, {(1, 0): 3, (9, 0): 3, (10, 0): 3}])
@pytest.mark.parametrize("together", [1, 40_000, 1 << 24])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_image_does_not_depend_on_the_number_of_layers_packed_together(
    shelf, monkeypatch, ranks, together, stored
):
    monkeypatch.setattr(blob_packing, "_BYTES_TOGETHER", together)
    ref = shelf.make("x", ranks, alpha=7.0 / 3.0, dtype=stored, shape=TWELVE_LAYERS)
    for dtype in (torch.float32, torch.bfloat16):
        _, layout, image = packed(shelf, "x", dtype, TWELVE_LAYERS)
        shelf.check(ref, LoraWeights(image, layout.rows[None]), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_a_blobs_tensors_and_a_mixture_of_dtypes_do_not_matter(shelf, dtype):
    ref = shelf.make("x", ALIKE, dtype=torch.bfloat16, shape=TWELVE_LAYERS)
    blob = shelf.blob("x")
    header, tensors = read_header(blob), load_file(blob)
    names = random.Random(0).sample(sorted(tensors), len(tensors))
    tensors = {
        name: tensors[name].float() if i % 3 else tensors[name] for i, name in enumerate(names)
    }
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16"}
    heads = {name: (kinds[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}
    values = b"".join(
        each.flatten().view(torch.uint8).numpy().tobytes() for each in tensors.values()
    )
    blob.write_bytes(header_bytes(heads, header.metadata) + values)
    _, layout, image = packed(shelf, "x", dtype, TWELVE_LAYERS)
    shelf.check(ref, LoraWeights(image, layout.rows[None]), 0)


@pytest.mark.parametrize("ranks", [ALIKE, ALIKE | {(12, SHAPE.index("lm_head")): 6}])
def test_the_arrived_part_of_an_incoming_blob_is_packed(shelf, monkeypatch, ranks):
    monkeypatch.setattr(blob_packing, "_BYTES_TOGETHER", 1)
    ref = shelf.make("x", ranks, shape=TWELVE_LAYERS)
    whole, waits = shelf.blob("x").read_bytes(), []
    spec = read_spec(shelf.blob("x"), TWELVE_LAYERS, LIMITS)
    layout = PackedLayout.of(spec, TWELVE_LAYERS)
    image = torch.full((layout.image_elements,), torch.nan)
    growing = shelf.blob("growing")
    growing.touch()

    def arrived(end: int) -> None:
        waits.append(end)
        growing.write_bytes(whole[:end])  # to read any further would fail

    pack(growing, spec, layout, image, arrived=arrived)
    shelf.check(ref, LoraWeights(image, layout.rows[None]), 0)
    assert waits == sorted(waits)
    assert len(set(waits)) == len({layer for layer, _ in ranks})
    assert waits[-1] == len(whole)


@pytest.mark.parametrize("world", [1, 2])
def test_threads_that_share_the_layers_pack_the_same_image(shelf, world):
    shape = dataclasses.replace(SHAPE, layers=7)
    places = {(layer, linear): 4 for layer in (0, 1, 2, 5) for linear in (0, 3, 5)}
    outer = {(shape.outer_layer, shape.index("lm_head")): 6}
    shelf.make("x", places | outer, shape=shape)
    spec = read_spec(shelf.blob("x"), shape, LIMITS)
    layout = PackedLayout.of(spec, shape, world)
    images, sums = [], []
    for threads in (None, 1, 2, 3, 8, 20):
        images.append(torch.zeros(layout.image_elements))
        sums.append(pack(shelf.blob("x"), spec, layout, images[-1], threads=threads))
    assert all(torch.equal(image, images[0]) for image in images)
    assert set(sums) == {sums[0]}
    assert sums[0] == tuple(
        one for span in images[0].view(world, -1) for one in layer_sums(span, layout.layers)
    )


def test_the_first_of_several_bad_matrices_is_named_whichever_thread_finds_one(shelf):
    shape = dataclasses.replace(SHAPE, layers=7)
    shelf.make("x", {(layer, 4): 2 for layer in range(7)}, alpha=1e8, shape=shape)
    spec = read_spec(shelf.blob("x"), shape, LIMITS)
    layout = PackedLayout.of(spec, shape)
    image = torch.empty(layout.image_elements, dtype=torch.float16)
    for threads in (1, 2, 7):
        with pytest.raises(AdapterRejected) as refused:
            pack(shelf.blob("x"), spec, layout, image, threads=threads)
        assert refused.value.field == "layers.0.gate_proj.lora_B"


def test_only_large_blobs_use_several_threads_and_only_if_torch_uses_one(monkeypatch):
    monkeypatch.setattr(blob_packing.os, "cpu_count", lambda: 32)

    def threads(size_bytes: int, torchs: int) -> int:
        monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
        return blob_packing._threads(size_bytes)

    assert [threads(size, 1) for size in (1, 2**24, 2**25, 2**30)] == [1, 1, 2, 4]
    assert threads(2**30, 16) == 1


def test_a_scaling_that_overflows_the_dtype_is_refused_by_tensor(shelf):
    shelf.make("loud", {(0, 1): 1}, alpha=1e6)
    with pytest.raises(AdapterRejected) as caught:
        packed(shelf, "loud", torch.float16)
    assert caught.value.field == "layers.0.k_proj.lora_B"
    packed(shelf, "loud", torch.bfloat16)


def overwrite(blob, span, values):
    with blob.open("r+b") as file:
        file.seek(span.begin)
        file.write(values.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_value_that_is_not_finite_is_refused_by_tensor(shelf, value, dtype):
    shelf.make("x", everywhere(4), dtype=torch.bfloat16)
    part = packed(shelf, "x")[0].linears[9]
    overwrite(shelf.blob("x"), part.a, torch.tensor([value], dtype=torch.bfloat16))
    with pytest.raises(AdapterRejected) as caught:
        packed(shelf, "x", dtype)
    assert caught.value.field == part.matrix("A")


def test_finite_values_whose_sum_overflows_are_accepted(shelf):
    shelf.make("x", everywhere(4), dtype=torch.float16)
    part = packed(shelf, "x")[0].linears[9]
    largest = torch.full(part.a.shape, 65504.0, dtype=torch.float16)
    overwrite(shelf.blob("x"), part.a, largest)
    _, layout, image = packed(shelf, "x", torch.float16)
    a, _ = matrices(layout, image, part.layer, part.linear)
    assert torch.equal(a, largest)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_packed_peft_adapter_adds_pefts_delta(tmp_path, use_rslora):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=40,
    )
    options = peft.LoraConfig(
        r=6,
        lora_alpha=11,
        use_rslora=use_rslora,
        target_modules=[*(linear.name for linear in SHAPE.linears), "lm_head"],
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
    groups, head = SHAPE.groups.values(), (SHAPE.index("lm_head"),)
    decoder = model.base_model.model
    places = [(i, layer, groups) for i, layer in enumerate(decoder.model.layers)]
    for index, layer, its_groups in (*places, (SHAPE.outer_layer, decoder, [head])):
        for group in its_groups:
            linears = [layer.get_submodule(SHAPE.modules[n].module) for n in group]
            x = torch.randn(5, SHAPE.dims(group[0])[0])
            y = torch.zeros(5, sum(SHAPE.dims(n)[1] for n in group))
            widths = tuple(SHAPE.dims(n)[1] for n in group)
            add_lora(y, x, weights, segments, index, LoraGroup(group, x.shape[1], widths))
            want = torch.cat([x @ one.get_delta_weight("default").T for one in linears], dim=1)
            torch.testing.assert_close(y, want, rtol=0, atol=16 * 1.2e-7 * want.abs().max().item())
