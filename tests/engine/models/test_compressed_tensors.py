"""Folders that compressed-tensors writes are served with the values that it reads back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lorikeet_engine.kernels.w4a16 import PackedWeight
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.models.stored_tensors import SINGLE
from tests.engine.models.fp8_models import rounded, rounded_model
from tests.engine.models.quantized_checkpoints import saved
from tests.engine.models.test_fp8_checkpoints import floats_logits, logits
from tests.engine.models.test_fp8_rounding import assert_near
from tests.engine.models.test_models import assert_equal
from tests.engine.models.test_packed_checkpoints import logits as logits_of
from tests.engine.models.test_packed_checkpoints import packed

COMPRESS = Path(__file__).with_name("compress.py")
PACKAGES = ("compressed-tensors==0.20.0", "loguru==0.7.3")
LEFT_OUT = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The folder of the packages, beside what is installed here."""
    folder = tmp_path_factory.mktemp("packages")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    if subprocess.run([*install, *PACKAGES], check=False).returncode:
        pytest.skip("compressed-tensors cannot be downloaded here")
    return folder


def compressed(library, plain, folder, scheme):
    """Write a quantised folder by the library; return the values that the library reads back."""
    environ = {**os.environ, "PYTHONPATH": str(library)}
    subprocess.run([sys.executable, COMPRESS, plain, folder, scheme], env=environ, check=True)
    return load_file(folder / "values.safetensors")


@pytest.mark.soak
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_a_folder_of_4_bits_of_the_library_is_served_with_its_values(
    library, tiny_checkpoints, tmp_path, scheme
):
    plain, folder = tiny_checkpoints["llama"], tmp_path / scheme
    values = compressed(library, plain, folder, scheme)
    want = logits(saved(plain, tmp_path / "floats", load_file(plain / SINGLE) | values))
    assert_equal(logits(folder), want)
    model = packed(folder)
    assert isinstance(model._layers[0].mlp.down.weight, PackedWeight)
    assert_equal(logits_of(folder, model), want)


@pytest.mark.soak
@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_a_folder_of_the_library_is_served_with_its_values(
    library, tiny_checkpoints, tmp_path, scheme
):
    plain, folder = tiny_checkpoints["llama"], tmp_path / scheme
    values = compressed(library, plain, folder, scheme)
    if scheme == "FP8_BLOCK":
        values = {
            name: weight if LEFT_OUT in name else rounded(weight) for name, weight in values.items()
        }
    reference = rounded_model(plain, values)
    reference.get_submodule(LEFT_OUT).__class__ = torch.nn.Linear
    assert_near(logits(folder), floats_logits(reference))
    model = load_model(folder, torch.device("cpu"), torch.float32)
    scales = model._layers[1].mixer.kv_scales
    assert scales.key == scales.value == pytest.approx(0.03)
