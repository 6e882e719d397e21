"""Each process reads its part of a shared model's weights, bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.fp8 import Fp8Rows
from lorikeet_engine.kernels.lora.linear import Weight
from lorikeet_engine.models import staging
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from tests.engine.models.quantized_checkpoints import write_fp8

GATE_UP = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
DOWN = ["model.layers.0.mlp.down_proj.weight"]
# of gate and up [96, 64] rows that are no whole blocks of scales, of down [64, 96] columns
ROWS = [Cut((96, 64), range(40, 90), range(64)), Cut((96, 64), range(8, 56), range(64))]
COLUMNS = [Cut((64, 96), range(64), range(32, 96))]
NARROW = [Cut((64, 96), range(64), range(30, 78))]
FUSED = ["model.layers.0.mlp.gate_up_proj.weight"] * 2
RUNS = [Cut((192, 64), range(40, 88), range(64)), Cut((192, 64), range(136, 184), range(64))]
KINDS = ["floats", "nf4", "dynamic", "static", "blocks"]


def read(folder: Path, kind: str, names: list[str], cuts: list[Cut]) -> Weight:
    config = ModelConfig.from_folder(folder)
    rounding = Quantization.NF4 if kind == "nf4" else None
    stored, cpu = config.quantized_linears, torch.device("cpu")
    with Checkpoint(folder, cpu, torch.float32, stored, rounding) as checkpoint:
        weight = checkpoint.read_linear(names, cuts)
    assert checkpoint.nbytes == weight.nbytes
    return weight


def written_as(kind: str, folder: Path, made: Path) -> tuple[str, Path]:
    """A kind of checkpoint, and its folder."""
    return kind, folder if kind in ("floats", "nf4") else write_fp8(folder, made, kind)[0]


@pytest.fixture(params=KINDS)
def case(request, tiny_checkpoints, tmp_path):
    return written_as(request.param, tiny_checkpoints["llama"], tmp_path)


@pytest.fixture(params=KINDS)
def fused(request, tiny_checkpoints, tmp_path):
    return written_as(request.param, tiny_checkpoints["phi3"], tmp_path)


def pair(case: tuple[str, Path], names: list[str], cuts: list[Cut]) -> tuple[Weight, list[Weight]]:
    """Read cut linears at once, and each of them whole."""
    kind, folder = case
    wholes = [[Cut.whole(*cut.shape)] for cut in cuts]
    return (
        read(folder, kind, names, cuts),
        [read(folder, kind, [name], whole) for name, whole in zip(names, wholes, strict=True)],
    )


def test_rows_of_fused_linears(case, monkeypatch):
    monkeypatch.setattr(staging, "STAGING_BYTES", 1 << 10)  # a few rows at a time
    assert_rows_kept(case, GATE_UP, ROWS)


def assert_rows_kept(case, names, cuts):
    got, wholes = pair(case, names, cuts)
    heights = [len(cut.rows) for cut in cuts]
    for part, whole, cut in zip(floats(got).split(heights), wholes, cuts, strict=True):
        assert torch.equal(part, cut.of(floats(whole)))
    assert_stays_fp8(case, got, *wholes)


def assert_stays_fp8(case, *weights):
    for weight in weights:
        assert isinstance(weight, Fp8Rows) == (case[0] not in ("floats", "nf4"))


def test_runs_of_rows_of_a_linear_that_stores_two(fused):
    assert_rows_kept(fused, FUSED, RUNS)


@pytest.mark.parametrize("cuts", [COLUMNS, NARROW])
def test_columns_of_a_linear(case, cuts, monkeypatch):
    monkeypatch.setattr(staging, "STAGING_BYTES", 1 << 10)
    got, (whole,) = pair(case, DOWN, cuts)
    assert_stays_fp8(case, got, whole)
    want = cuts[0].of(floats(whole))
    if case[0] == "blocks" and cuts is NARROW:  # rounded once more, to scales of rows
        assert isinstance(got, Fp8Rows)
        assert got.block is None
        assert (floats(got) - want).abs().max() <= 2**-3 * want.abs().max()
    else:
        assert torch.equal(floats(got), want)


def test_processes_that_share_columns_have_blocks_of_one_size(tiny_checkpoints, tmp_path):
    kind, folder = written_as("blocks", tiny_checkpoints["llama"], tmp_path)
    halves = [[Cut((64, 96), range(64), range(b, b + 48))] for b in (0, 48)]
    first, second = (read(folder, kind, DOWN, cuts) for cuts in halves)
    assert first.scales.shape == second.scales.shape
    assert first.block == second.block


def test_the_whole_stored_tensor_is_checked_even_if_a_part_is_kept(tiny_checkpoints):
    wrong = [Cut((64, 90), range(64), range(30, 78))]
    with pytest.raises(ModelError, match=r"down_proj.weight is F32 \[64, 96\]: want \[64, 90\]"):
        read(tiny_checkpoints["llama"], "floats", DOWN, wrong)


def floats(weight: Weight) -> torch.Tensor:
    return weight.floats() if isinstance(weight, Fp8Rows) else weight


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_buffers_are_not_filled_again_before_another_gpu_than_the_first_has_read_them(tmp_path):
    names, side = [f"w{n}" for n in range(8)], 4096  # four buffers each
    saved = {name: torch.randn(side, side) for name in names}
    save_file(saved, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint(tmp_path, torch.device("cuda", 1), torch.float32) as checkpoint:
        read = {name: checkpoint.read([name], [side], side) for name in names}
    assert all(torch.equal(read[name].cpu(), saved[name]) for name in names)
