"""Adapters of a family whose checkpoints store several linears as one: Phi 3's qkv, gate and up."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lorikeet_engine.adapter_format import FAMILIES, AdapterLimits, BaseShape, Family, read_spec
from lorikeet_engine.errors import AdapterRejected
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.disk.image_file import ImageFile, fingerprint, write_image
from lorikeet_engine.residency.packed_image import PackedImage, PackedLayout
from tests.engine.blob_shelf import BlobShelf
from tests.engine.peft_adapters import save_adapter

CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 512,
    "sliding_window": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "everywhere": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "fused": {"r": 5, "lora_alpha": 7, "target_modules": ["qkv_proj", "gate_up_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["qkv_proj", "o_proj", "down_proj"],
        "rank_pattern": {"qkv_proj": 12, r"layers\.1\.mlp\.down_proj": 3},
        "alpha_pattern": {"o_proj": 32},
    },
}
LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phi3")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = transformers.AutoConfig.for_model("phi3", **CONFIG)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """PEFT's folders by the adapter's name."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(checkpoint, root / name, seed, **lora)
        for seed, (name, lora) in enumerate(ADAPTERS.items())
    }


@pytest.fixture
def shape(checkpoint: Path) -> BaseShape:
    return ModelConfig.from_folder(checkpoint).shape


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_image_holds_each_matrix_once_and_is_read_back_from_its_file(
    folders: dict[str, Path], shape: BaseShape, shelf: BlobShelf, tmp_path: Path, name: str
) -> None:
    blob = shelf.folder / shelf.add(folders[name], name).digest
    spec = read_spec(blob, shape, LIMITS)
    layout = PackedLayout.of(spec, shape)
    image = torch.full((layout.elements,), torch.nan)
    sums = pack(blob, spec, layout, image)
    assert not image.isnan().any()
    assert layout.elements == spec.packed_elements(shape.dims)
    assert layout.rows.shape == (3, len(shape.modules), 3)

    write_image(tmp_path / "image", "image", PackedImage(layout, image, sums))
    file = ImageFile.of(tmp_path / "image", shape)
    again = torch.full_like(image, torch.nan)
    file.read(again)
    assert torch.equal(again, image)
    assert torch.equal(file.layout.rows, layout.rows)


def test_the_linears_are_as_wide_as_the_models_own(checkpoint: Path, shape: BaseShape) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    for index, linear in enumerate(shape.linears):
        module = model.get_submodule(linear.path(1))
        assert shape.dims(index) == (module.in_features, module.out_features)


def test_linears_of_another_family_are_refused_by_name(
    folders: dict[str, Path], shelf: BlobShelf
) -> None:
    llama = BaseShape(
        "llama", 2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocabulary=40
    )
    blob = shelf.folder / shelf.add(folders["fused"], "fused").digest
    with pytest.raises(AdapterRejected, match="up_proj cannot be adapted: want q_proj, k"):
        read_spec(blob, llama, LIMITS)


def test_an_image_of_other_linears_has_another_fingerprint(shape: BaseShape) -> None:
    llama = BaseShape(
        "llama", 2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocabulary=40
    )
    kinds = {fingerprint(one, LIMITS, torch.float32) for one in (shape, llama)}
    assert len(kinds) == 2


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_group_reads_one_input_and_its_linears_are_neighbours(family: Family) -> None:
    groups = [linear.group for linear in family.linears]
    assert groups == sorted(groups, key=groups.index)
    for group in groups:
        assert len({linear.inputs for linear in family.linears if linear.group == group}) == 1
