"""Registration predicts an adapter's image: its size, and values that do not fit."""

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import (
    AdapterLimits,
    AdapterMemory,
    check_values,
    read_spec,
    write_blob,
)
from lorikeet_engine.errors import AdapterRejected, AdapterTooLarge
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.packed_image import PackedLayout
from tests.engine.blobs import SHAPE, Shelf, everywhere, save_peft_folder
from tests.engine.pairs import pairs

LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 20)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EDGES = {torch.float16: 65520.0, torch.bfloat16: (2 - 2**-8) * 2.0**127, torch.float32: torch.inf}
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def spoilt(shelf: Shelf, side: str, value: float, alpha: float, stored: torch.dtype):
    """Blob and spec of an adapter that is zero except one value."""
    folder = shelf.blob("x-peft")
    folder.mkdir(parents=True)
    save_peft_folder(folder, "x", {(1, 4): 2}, alpha, stored)
    tensors = {n: t.zero_() for n, t in load_file(folder / "adapter_model.safetensors").items()}
    (name,) = (name for name in tensors if f"lora_{side}" in name)
    tensors[name][1, 1] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    write_blob(folder, shelf.blob("x"))
    return shelf.blob("x"), read_spec(shelf.blob("x"), SHAPE, LIMITS)


def refusal(work) -> str | None:
    try:
        work()
    except AdapterRejected as error:
        return str(error.field)
    return None


@pytest.mark.parametrize(
    ("stored_as", "scaled_by"),
    pairs(
        itertools.product(DTYPES, DTYPES),
        [(side, scaling) for scaling in (1.0, 2.0, -0.5, 1e5) for side in "AB"],
    ),
)
def test_values_are_accepted_exactly_if_they_can_be_packed(stored_as, scaled_by, tmp_path):
    (dtype, stored), (side, scaling) = stored_as, scaled_by
    below = torch.tensor(EDGES[dtype]).nextafter(torch.tensor(0.0))
    edge = EDGES[dtype]
    values = [below, edge, -edge, below / scaling, edge / scaling, 1.0, torch.nan, -torch.inf]
    for number, value in enumerate(values):
        shelf = Shelf(tmp_path / str(number))
        blob, spec = spoilt(shelf, side, float(value), 2 * scaling, stored)
        layout = PackedLayout.of(spec, SHAPE)
        image = torch.empty(layout.elements, dtype=dtype)
        said = refusal(lambda: check_values(blob, spec, NAMES[dtype]))  # noqa: B023
        found = refusal(lambda: pack(blob, spec, layout, image))  # noqa: B023
        assert (said is None) == (found is None), value
        assert said in (None, f"layers.1.gate_proj.lora_{side}")


def test_a_value_that_only_overflows_in_the_image_has_its_own_error(tmp_path):
    blob, spec = spoilt(Shelf(tmp_path), "B", 40_000.0, alpha=4.0, stored=torch.float32)
    check_values(blob, spec, "bfloat16")
    with pytest.raises(AdapterRejected, match=r"lora_B holds 80000, which float16 cannot hold"):
        check_values(blob, spec, "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [everywhere(5), {(0, 0): 3, (1, 6): 1}])
def test_the_predicted_bytes_equal_the_packed_layouts(dtype, ranks, tmp_path):
    shelf = Shelf(tmp_path)
    shelf.make("x", ranks)
    spec = read_spec(shelf.blob("x"), SHAPE, LIMITS)
    elements, name = spec.packed_elements(SHAPE.dims), NAMES[dtype]
    want = PackedLayout.of(spec, SHAPE).elements * dtype.itemsize
    assert AdapterMemory(name).image_bytes(elements) == want
    assert AdapterMemory(name, want, want).image_bytes(elements) == want
    for room, where in (((want - 1, None), "GPU"), ((None, want - 1), "host")):
        said = rf"takes {want} bytes.* on (a|the) {where} .* holds {want - 1}"
        with pytest.raises(AdapterTooLarge, match=said):
            AdapterMemory(name, *room).image_bytes(elements)


def test_the_predicted_bytes_of_divided_adapters_are_one_gpus_on_the_gpu_and_all_on_the_host(
    tmp_path,
):
    world, shelf = 2, Shelf(tmp_path)
    outer = {(SHAPE.outer_layer, SHAPE.index(name)): 3 for name in ("lm_head", "embed_tokens")}
    shelf.make("x", everywhere(5) | outer)
    spec = read_spec(shelf.blob("x"), SHAPE, LIMITS)
    kept = Shard(0, world).ranges(SHAPE)
    elements = spec.packed_elements(lambda n: kept[n].dims)
    layout = PackedLayout.of(spec, SHAPE, world)
    assert elements == layout.elements < PackedLayout.of(spec, SHAPE).elements
    on_host = 4 * layout.image_elements
    assert AdapterMemory("float32", host_bytes=on_host).image_bytes(elements, world) == 4 * elements
    with pytest.raises(AdapterTooLarge, match=f"takes {on_host} bytes"):
        AdapterMemory("float32", host_bytes=on_host - 1).image_bytes(elements, world)


def test_a_spec_lists_the_modules_that_the_adapter_changes(tmp_path):
    shelf = Shelf(tmp_path)
    shelf.make("x", {(1, 4): 8, (0, 0): 3, (1, 0): 3})
    touches = read_spec(shelf.blob("x"), SHAPE, LIMITS).touches
    assert touches.linears == ("q_proj", "gate_proj")
    assert (touches.layers, touches.min_rank) == (2, 3)
    assert touches.parameters == 2 * 3 * (16 + 16) + 8 * (16 + 32)
