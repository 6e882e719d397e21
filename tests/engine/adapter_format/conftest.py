"""A good adapter as PEFT saves it."""

from pathlib import Path

import pytest

from tests.engine.tiny_llama import trained


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trained(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a fresh copy of a good folder, to be spoilt."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    return tmp_path
