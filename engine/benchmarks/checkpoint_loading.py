"""How long a start takes to load a base model from files, by the format that they have.

python -m engine.benchmarks.checkpoint_loading --json checkpoint_loading.json
    [--formats bf16 nf4] [--layers 16] [--folder /tmp]

Llama-3.1-8B's shapes, random weights, each linear rounded as its format can hold it: what an engine
does as it starts, in its stage "weights", twice. The files were written right before and are in
page cache, if the machine has room for them; each format's are removed before the next. What is
served is held against the numbers that were written.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.benchmarks import harness
from engine.benchmarks.random_checkpoint import write_checkpoint
from engine.benchmarks.random_model import LLAMA_3_1_8B, RandomCheckpoint
from engine.benchmarks.weight_layouts import LAYOUTS
from lorikeet_engine.execution.assembly import load_weights
from lorikeet_engine.kernels.fp8 import Fp8Rows
from lorikeet_engine.models.llama import LlamaModel, load_model
from lorikeet_engine.settings import EngineSettings
from lorikeet_engine.telemetry.start_up import StartUpStages

WEIGHT_DTYPES: Mapping[str, Sequence[str]] = {"bf16": ("auto", "fp8", "nf4")}
"""By format, what is asked of EngineSettings.weight_dtype, where that is not auto alone."""
_TIMES = 2
# What rounding may change, as a share of a weight. 4 bits for groups of 128 change 11% of normal
# numbers; to read a wrong tensor would change 140%.
_ROUNDING = 0.2


@dataclass(frozen=True, slots=True)
class Row:
    """A format's files, and their loads one after another.

    seconds: of each load; the very first imports some of torch, too. gb_per_s: of the files, by the
    last load. gpu_gb: what the device has less for it; peak_gb: the most that tensors took there
    meanwhile, None without a GPU. error: of the last layer's linears as served, as a share of the
    numbers that were written.
    """

    format: str
    weight_dtype: str
    file_gb: float
    seconds: list[float]
    gb_per_s: float
    gpu_gb: float
    peak_gb: float | None
    error: float


def measure(
    folder: Path, config: Mapping[str, Any], device: torch.device, formats: Sequence[str]
) -> Iterator[Row]:
    """The rows of some formats. folder: for their files, one format's at a time.

    Raises AssertionError where other weights are served than were written.
    """
    for name in formats:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            model = write_checkpoint(Path(own) / "model", config, device, LAYOUTS[name])
            harness.empty_device()
            for weight_dtype in WEIGHT_DTYPES.get(name, ("auto",)):
                yield _load(name, model, device, weight_dtype)


def served_error(model: LlamaModel, device: torch.device) -> float:
    """How far the last layer's linears are from the numbers that were drawn, as a share of them."""
    shape, layer = model.config.shape, model._layers[-1]
    drawn = RandomCheckpoint(device, torch.bfloat16)
    squares = squares_off = 0.0
    for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
        members = linear.group.linears
        names = [f"{shape.linears[n].path(shape.layers - 1)}.weight" for n in members]
        want = drawn.read(names, linear.group.d_outs, linear.group.d_in).float()
        weight = linear.weight
        if isinstance(weight, Fp8Rows):
            weight = weight.floats()
        squares += float(want.square().sum())
        squares_off += float((weight.float() - want).square().sum())
    return float((squares_off / squares) ** 0.5)


def main() -> None:
    """Measure the formats that are asked for."""
    parser = harness.arguments(__doc__)
    layers = LLAMA_3_1_8B["num_hidden_layers"]
    parser.add_argument("--formats", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--layers", type=int, default=layers, help="of the model")
    parser.add_argument("--folder", type=Path, help="for up to 16 GB of files; without: /tmp")
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    config = LLAMA_3_1_8B | {"num_hidden_layers": options.layers}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = harness.show(measure(options.folder, config, device, options.formats))
    harness.write(options.json, facts, layers=options.layers, checkpoint_loading=rows)


def _load(name: str, folder: Path, device: torch.device, weight_dtype: str) -> Row:
    settings = EngineSettings(
        folder, folder, device=device.type, dtype="bfloat16", weight_dtype=weight_dtype
    )
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    seconds = []
    for _ in range(_TIMES):
        harness.empty_device()
        start = StartUpStages(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model = load_weights(load_model, settings, device, None, start)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        error = served_error(model, device)
        most = 0.0 if (name, weight_dtype) == ("bf16", "auto") else _ROUNDING
        assert error <= most, f"{name}, {weight_dtype}: {error:.1%} off what was written"
        seconds.append(start.seconds["weights"])
        del model
    return Row(
        name,
        weight_dtype,
        file_bytes / 1e9,
        seconds,
        file_bytes / 1e9 / seconds[-1],
        start.bytes["weights"] / 1e9,
        None if peak is None else peak / 1e9,
        error,
    )


if __name__ == "__main__":
    main()
