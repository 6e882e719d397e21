"""The benchmark of base models' loading: every format is written, accepted, held to its numbers."""

import json
import sys

import pytest
import torch

from engine.benchmarks import checkpoint_loading, harness, random_checkpoint
from engine.benchmarks.checkpoint_loading import measure
from engine.benchmarks.random_checkpoint import write_checkpoint
from engine.benchmarks.random_model import LLAMA_3_1_8B, RandomCheckpoint
from engine.benchmarks.weight_layouts import LAYOUTS, Layout
from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.kernels.fp8 import Fp8Rows
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.models.weight_formats.nf4 import round_to_nf4

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
CONFIG = LLAMA_3_1_8B | SIZES
# What rounding changes of normal numbers, as a share of them: at least, at most.
ERRORS = {
    ("bf16", "auto"): (0, 0),
    ("bf16", "fp8"): (0.02, 0.04),
    ("bf16", "nf4"): (0.08, 0.11),
    ("fp8 dynamic", "auto"): (0.02, 0.04),
    ("fp8 static", "auto"): (0.02, 0.04),
    ("fp8 blocks", "auto"): (0.02, 0.04),
    ("nf4", "auto"): (0.08, 0.11),
    ("awq", "auto"): (0.08, 0.13),
    ("gptq", "auto"): (0.08, 0.13),
}
FORMATS = {
    "bf16": None,
    "fp8 dynamic": Quantization.FP8,
    "fp8 static": Quantization.FP8,
    "fp8 blocks": Quantization.FP8,
    "nf4": Quantization.NF4,
    "awq": Quantization.AWQ,
    "gptq": Quantization.GPTQ,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two would mostly wait for each other over tensors this small."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """A second each, of all that the tests before have left."""
    monkeypatch.setattr(harness, "empty_device", lambda: None)


def test_every_format_is_loaded_twice_and_serves_what_was_written(tmp_path):
    rows = list(measure(tmp_path, CONFIG, CPU, list(LAYOUTS)))
    assert [(row.format, row.weight_dtype) for row in rows] == list(ERRORS)
    for row in rows:
        least, most = ERRORS[row.format, row.weight_dtype]
        assert least <= row.error <= most, row.format
        assert len(row.seconds) == 2
        assert row.gb_per_s == pytest.approx(row.file_gb / row.seconds[-1])
    sizes = {row.format: row.file_gb for row in rows}
    assert sizes["nf4"] < sizes["fp8 static"] < sizes["bf16"]
    assert list(tmp_path.iterdir()) == [], "files are removed"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_is_of_its_format_and_served_in_it(tmp_path, name):
    folder = write_checkpoint(tmp_path / "model", CONFIG, CPU, LAYOUTS[name])
    stored = ModelConfig.from_folder(folder).quantized_linears
    assert (stored and stored.format) == FORMATS[name]
    weight = load_model(folder, CPU, torch.bfloat16)._layers[0].attention.o.weight
    assert isinstance(weight, Fp8Rows) == (FORMATS[name] is Quantization.FP8)


def test_an_nf4_folder_holds_what_rounding_to_nf4_makes(tmp_path):
    folder = write_checkpoint(tmp_path / "model", CONFIG, CPU, LAYOUTS["nf4"])
    name = "model.layers.1.self_attn.o_proj.weight"
    drawn = RandomCheckpoint(CPU, torch.bfloat16).read([name], [128], 128)
    weight = load_model(folder, CPU, torch.bfloat16)._layers[1].attention.o.weight
    assert torch.equal(weight, round_to_nf4(drawn))


def test_other_weights_than_were_written_are_not_timed(tmp_path, monkeypatch):
    awq = LAYOUTS["awq"]
    turned = Layout(lambda name, weight: awq.tensors_of(name, weight.flip(0)), awq.config)
    monkeypatch.setitem(checkpoint_loading.LAYOUTS, "awq", turned)
    with pytest.raises(AssertionError, match="awq, auto: 14"):
        list(measure(tmp_path, CONFIG, CPU, ["awq"]))


def test_a_quantised_model_may_have_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES", 100_000)
    (row,) = measure(tmp_path, CONFIG, CPU, ["gptq"])
    assert row.error < 0.13


def test_main_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint_loading, "LLAMA_3_1_8B", CONFIG)
    out = tmp_path / "out.json"
    asked = ["--formats", "fp8 static", "--layers", "1", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["checkpoint_loading", "--json", str(out), *asked])
    checkpoint_loading.main()
    written = json.loads(out.read_text())
    assert written["layers"] == 1
    assert [row["format"] for row in written["checkpoint_loading"]] == ["fp8 static"]
    assert "file_gb" in capsys.readouterr().out
