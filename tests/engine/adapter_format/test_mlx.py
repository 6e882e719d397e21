"""MLX's folders: the same deltas, or a refusal by name."""

import json
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorikeet_engine.adapter_format import AdapterLimits, read_spec, write_blob
from lorikeet_engine.adapter_format.header import read_header
from lorikeet_engine.adapter_format.lora_config import LoraConfig
from lorikeet_engine.errors import AdapterRejected
from tests.engine.adapter_format.peft_folder import edit_config
from tests.engine.adapter_format.test_accepted_adapters import delta
from tests.engine.adapter_format.test_experts import packed_deltas
from tests.engine.tiny_llama import SHAPE

LIMITS = AdapterLimits(max_rank=16, max_bytes=1 << 20)
RANK, SCALE = 4, 20.0
TRAINER = Path(__file__).with_name("mlx_trainer.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One layer as mlx_lm.lora 0.32.2 saves it: names, shapes and keys."""
    draw = np.random.default_rng(0)
    tensors = {
        f"model.layers.1.{module}.lora_{side}": draw.normal(size=size).astype(np.float32)
        for module, (d_in, d_out) in {"self_attn.q_proj": (32, 32), "mlp.up_proj": (32, 48)}.items()
        for side, size in (("a", (d_in, RANK)), ("b", (RANK, d_out)))
    }
    save_file(tensors, tmp_path / "adapters.safetensors")
    with_null_metadata(tmp_path / "adapters.safetensors")
    config = {
        "model": "mlx-community/tiny-4bit",
        "fine_tune_type": "lora",
        "num_layers": 1,
        "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.0},
        "train": True,
        "data": "data",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


def with_null_metadata(file: Path) -> None:
    """Write the header as MLX's C++ does."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps({"__metadata__": None, **json.loads(data[8 : 8 + length])}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def deltas(folder: Path) -> dict[str, np.ndarray]:
    """Delta of each module by the packed adapter, [d_out, d_in]."""
    write_blob(folder, folder / "blob")
    data, spec = (folder / "blob").read_bytes(), read_spec(folder / "blob", SHAPE, LIMITS)
    found = {}
    for part in spec.linears:
        module = SHAPE.modules[part.linear]
        inside = part.layer < SHAPE.layers
        found[module.path(part.layer) if inside else module.module] = delta(part, data)
    return found


def test_an_mlx_adapter_has_the_deltas_of_mlx(folder: Path) -> None:
    saved, got = load_file(folder / "adapters.safetensors"), deltas(folder)
    assert set(got) == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}
    for module, found in got.items():
        want = SCALE * (saved[f"{module}.lora_a"] @ saved[f"{module}.lora_b"]).T
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    metadata = read_header(folder / "blob").metadata["lorikeet"]
    assert LoraConfig.from_json(metadata).base_model_name_or_path == "mlx-community/tiny-4bit"


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_matrices_of_any_dtype_are_transposed(folder: Path, dtype: type[np.generic]) -> None:
    want = deltas(folder)
    tensors = load_file(folder / "adapters.safetensors")
    save_file({n: t.astype(dtype) for n, t in tensors.items()}, folder / "adapters.safetensors")
    write_blob(folder, folder / "blob")
    for name, tensor in load_file(folder / "blob").items():
        module = name.removeprefix("base_model.model.").partition(".lora_")[0]
        side = "lora_a" if "lora_A" in name else "lora_b"
        np.testing.assert_array_equal(tensor, tensors[f"{module}.{side}"].T.astype(tensor.dtype))
    assert set(want) == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"fine_tune_type": "dora"}, "fine_tune_type"),
        ({"fine_tune_type": "full", "lora_parameters": None}, "fine_tune_type"),
        ({"lora_parameters": None}, "lora_parameters"),
        ({"lora_parameters": {"rank": 4}}, "lora_parameters"),
        ({"lora_parameters": {"rank": 4, "scale": 20, "alpha": 16}}, "lora_parameters"),
        ({"lora_parameters": {"rank": "4", "scale": 20}}, "lora_parameters"),
        ({"lora_parameters": {"rank": 8, "scale": 20}}, "model.layers.1.mlp.up_proj"),
    ],
)
def test_unsupported_options_are_refused_by_name(
    folder: Path, changes: dict[str, Any], field: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(AdapterRejected) as refused:
        write_blob(folder, folder / "blob")
    assert refused.value.field == field


def test_an_adapter_of_embeddings_and_head_has_the_deltas_of_mlx(folder: Path) -> None:
    draw = np.random.default_rng(3)
    sizes = {"model.embed_tokens": (64, 32), "lm_head": (32, 64)}
    for module, (d_in, d_out) in sizes.items():
        a, b = (draw.normal(size=size).astype(np.float32) for size in ((d_in, RANK), (RANK, d_out)))
        tensors = load_file(folder / "adapters.safetensors")
        tensors |= {f"{module}.lora_a": a, f"{module}.lora_b": b}
        save_file(tensors, folder / "adapters.safetensors")
        if module == "model.embed_tokens":
            with pytest.raises(AdapterRejected, match=r"tied to the embeddings, MLX adds .* both"):
                deltas(folder)
    got = deltas(folder)
    for module in sizes:
        a, b = (tensors[f"{module}.lora_{side}"] for side in "ab")
        np.testing.assert_allclose(got[module], SCALE * (a @ b).T, rtol=1e-5, atol=1e-5)


@pytest.mark.soak
def test_an_adapter_saved_by_mlx_itself_has_its_deltas(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    try:
        urllib.request.urlopen("https://pypi.org/simple/mlx-lm/", timeout=5).close()
    except OSError:
        pytest.skip("mlx-lm cannot be downloaded here")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    packages = ["mlx-lm==0.32.2", "mlx[cpu]==0.32.4"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    for family in ("llama", "qwen3_moe", "gpt_oss"):
        folder = tmp_path / family
        folder.mkdir()
        subprocess.run([python, TRAINER, folder, family], check=True)
        of_family = (
            deltas if family == "llama" else partial(packed_deltas, tiny_checkpoints[family])
        )
        got, want = of_family(folder), np.load(folder / "deltas.npz")
        experts = "switch_mlp" if family == "qwen3_moe" else "experts"
        assert {module.replace("experts", experts) for module in got} == set(want)
        for module, found in got.items():
            added = want[module.replace("experts", experts)]
            np.testing.assert_allclose(found, added, rtol=1e-4, atol=1e-4)
