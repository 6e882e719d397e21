"""Image files: an image is read as it was packed, and no other file is accepted."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from lorikeet_engine.adapter_format import AdapterLimits, BaseShape, read_spec
from lorikeet_engine.adapter_format.families import LayerKind
from lorikeet_engine.adapter_format.shape import AttentionHeads, LatentShape, RecurrentShape
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.disk.image_file import ImageFile, fingerprint, write_image
from lorikeet_engine.residency.packed_image import PackedImage, PackedLayout
from tests.engine.blobs import SHAPE, Shelf, everywhere

LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 20)
OUTER = {(SHAPE.outer_layer, SHAPE.index(name)): 6 for name in ("lm_head", "embed_tokens")}
UNEVEN = {(0, 0): 3, (0, 2): 5, (0, 6): 1, (1, 4): 8, (1, 5): 2}
NAME = "an image"
OTHER_SHAPES = {
    "family": "mistral",
    "layers": 4,
    "hidden": 32,
    "intermediate": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocabulary": 48,
    "tied": True,
    "experts": 4,
    "shared_intermediate": 16,
    "kinds": (LayerKind.ATTENTION,) * 2,
    "recurrent": RecurrentShape(2, 8, 4, 8, 4),
    "dense_intermediate": 16,
    "latent": 8,
    "full": AttentionHeads(1, 8),
    "latents": LatentShape(8, 8, 4, 4, 8),
    "wide_intermediate": 16,
    "layer_input": 8,
    "biased": ("qkv",),
}


@pytest.fixture
def written(tmp_path):
    """Pack an adapter and write its image; return file, layout and image."""
    shelf = Shelf(tmp_path)

    def write(ranks=UNEVEN, dtype=torch.bfloat16, shape=SHAPE, world=1):
        shelf.make("x", ranks, shape=shape)
        spec = read_spec(shelf.blob("x"), shape, LIMITS)
        layout = PackedLayout.of(spec, shape, world)
        image = torch.zeros(layout.image_elements, dtype=dtype)
        sums = pack(shelf.blob("x"), spec, layout, image)
        path = tmp_path / NAME
        write_image(path, NAME, PackedImage(layout, image, sums))
        return path, layout, image

    return write


@pytest.mark.parametrize("ranks", [everywhere(4), UNEVEN | OUTER, {(1, 3): 64}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_the_image_and_its_layout_are_read_bit_for_bit(written, ranks, dtype, world):
    shape = BaseShape(
        "llama", 2, hidden=18, intermediate=22, heads=2, kv_heads=1, head_dim=5, vocabulary=40
    )
    path, layout, image = written(ranks, dtype, shape, world)
    file = ImageFile.of(path, shape, world)
    out = torch.full_like(image, torch.nan)
    file.read(out)
    assert torch.equal(out.view(torch.uint8), image.view(torch.uint8))
    assert torch.equal(file.layout.rows, layout.rows)
    fields = ("elements", "max_rank", "ranges", "layers", "head_rank", "head_rows")
    for field in (*fields, "changes_experts"):
        assert getattr(file.layout, field) == getattr(layout, field)


def test_any_safetensors_reader_can_open_the_file(written):
    path, _, image = written()
    assert torch.equal(load_file(path)["image"], image)


def test_an_image_is_read_into_its_part_of_the_arena(written):
    path, layout, image = written()
    arena = torch.zeros(3 * layout.elements, dtype=image.dtype)
    middle = arena[layout.elements : 2 * layout.elements]
    ImageFile.of(path, SHAPE).read(middle)
    assert torch.equal(middle, image)
    assert arena.count_nonzero() == image.count_nonzero()


def test_the_fingerprint_depends_on_everything_that_determines_an_image():
    assert OTHER_SHAPES.keys() == {field.name for field in dataclasses.fields(SHAPE)}
    base = (SHAPE, LIMITS, torch.float16, 1)
    changes = [
        *(
            (dataclasses.replace(SHAPE, **{field: value}), *base[1:])
            for field, value in OTHER_SHAPES.items()
        ),
        (SHAPE, dataclasses.replace(LIMITS, max_rank=32), *base[2:]),
        (*base[:2], torch.bfloat16, 1),
        *((*base[:3], world) for world in (2, 4)),
    ]
    fingerprints = {fingerprint(*facts) for facts in (base, *changes)}
    assert len(fingerprints) == 1 + len(changes)
    assert fingerprint(*base) == fingerprint(dataclasses.replace(SHAPE), *base[1:])


@pytest.mark.parametrize("kept", [0, 7, 100, -100, -1])
def test_a_truncated_file_is_refused(written, kept):
    path, _, _ = written()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(AdapterRejected):
        ImageFile.of(path, SHAPE)


def test_a_file_truncated_after_its_opening_is_refused(written):
    path, _, image = written()
    file = ImageFile.of(path, SHAPE)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AdapterRejected, match="damaged"):
        file.read(torch.empty_like(image))


@pytest.mark.parametrize("at", [-1, -700, -1000])
def test_an_image_with_a_flipped_bit_is_refused(written, at):
    path, _, image = written()
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(AdapterRejected, match="damaged"):
        ImageFile.of(path, SHAPE).read(torch.empty_like(image))


def test_random_bytes_are_refused(written):
    path, _, _ = written()
    for length in (0, 8, 1000):
        path.write_bytes(length.to_bytes(8, "little") + b"\xa5" * 2000)
        with pytest.raises(AdapterRejected):
            ImageFile.of(path, SHAPE)


def test_a_file_under_another_name_is_refused(written):
    path, _, _ = written()
    other = path.rename(path.with_name("another image"))
    with pytest.raises(AdapterRejected, match="damaged"):
        ImageFile.of(other, SHAPE)


def with_metadata(written, **changes):
    """A file with other metadata, None: without it; of an adapter that leaves linear 0 alone."""
    path, _, image = written({(1, 3): 4})
    length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8:length])
    facts = header["__metadata__"] | changes
    header["__metadata__"] = {key: value for key, value in facts.items() if value is not None}
    text = json.dumps(header).encode()
    data = image.view(torch.uint8).numpy().tobytes()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_other_metadata_is_read(written):
    path = with_metadata(written, more="of another kind")
    assert ImageFile.of(path, SHAPE).layout.max_rank == 4


@pytest.mark.parametrize("ranks", [None, "", "3 4", "3 " * 15, "3 " * 13 + "x", "3 " * 13 + "-3"])
def test_ranks_that_do_not_fit_the_image_are_refused(written, ranks):
    with pytest.raises(AdapterRejected, match="damaged"):
        ImageFile.of(with_metadata(written, ranks=ranks), SHAPE)


@pytest.mark.parametrize("shared_a", [None, "x", "-1", "1 999", "0"])
def test_linears_that_cannot_share_the_preceding_a_are_refused(written, shared_a):
    with pytest.raises(AdapterRejected, match="damaged"):
        ImageFile.of(with_metadata(written, shared_a=shared_a), SHAPE)


@pytest.mark.parametrize("shared_outer", [None, "x", "-1", "0", "999"])
def test_matrices_that_no_experts_can_share_are_refused(written, shared_outer):
    with pytest.raises(AdapterRejected, match="damaged"):
        ImageFile.of(with_metadata(written, shared_outer=shared_outer), SHAPE)


def test_an_image_of_another_size_than_its_ranks_say_is_refused(written):
    path, _, _ = written(everywhere(4))
    text = path.read_bytes()
    path.write_bytes(text.replace(b"4 4 4", b"4 4 5"))
    with pytest.raises(AdapterRejected, match="damaged"):
        ImageFile.of(path, SHAPE)
