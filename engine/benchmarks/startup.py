"""A start of an engine: seconds and memory of each stage, its weights read from the page cache.

python -m engine.benchmarks.startup --checkpoint /tmp/llama --json results.json

Writes a checkpoint of Llama-3.1-8B's shapes to the folder if there is none, reads it once so that
it is in the page cache, and builds an engine from it as a replica does. Triton and FlashInfer keep
what they have compiled on disk: the first start on a machine takes longer than the next.
"""

import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from engine.benchmarks import harness
from engine.benchmarks.random_adapters import Nowhere
from engine.benchmarks.random_checkpoint import write_checkpoint
from engine.benchmarks.random_model import LLAMA_3_1_8B
from lorikeet_engine.device_memory import Share, gib
from lorikeet_engine.engine import Engine, EngineSettings

# What a replica on CUDA is told where nothing is set, but for the tokens of a step.
SETTINGS = EngineSettings(
    model=Path(),
    cache_dir=Path(),
    device="cuda",
    dtype="bfloat16",
    adapter_dtype="bfloat16",
    kv_bytes=Share(0.9),
    adapter_gpu_bytes=Share(0.1),
    max_batch_tokens=8192,
)


def measure(folder: Path, settings: EngineSettings) -> dict[str, float]:
    """Start an engine from the checkpoint: what its log says that it took, and `all_s`.

    Raises AssertionError when the weights on the device are not those of the files.
    """
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        _read(file)
    log, started = logging.getLogger("lorikeet_engine.assembly"), _Started()
    log.addHandler(started)
    log.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as cache:
        settings = replace(settings, model=folder, cache_dir=Path(cache))
        began_s = time.perf_counter()
        engine = Engine(settings, Nowhere())
        all_s = time.perf_counter() - began_s
        _check(engine, files)
        engine.close()
    log.removeHandler(started)
    return {**started.facts, "all_s": all_s}


def show(took: dict[str, float]) -> None:
    """Print a table of what measure gave."""
    stages = [name.removesuffix("_s") for name in took if name.endswith("_s") and name != "all_s"]
    for stage in stages:
        print(f"{stage:<18}{took[f'{stage}_s']:>7.2f} s{gib(took[f'{stage}_bytes']):>14}")
    print(f"{'all':<18}{took['all_s']:>7.2f} s")
    print(f"{took['kv_tokens']} tokens of KV; {gib(took['free_bytes'])} left", flush=True)


class _Started(logging.Handler):
    """Keeps what an engine logs of its start."""

    facts: dict[str, float]

    def emit(self, record: logging.LogRecord) -> None:
        self.facts = {
            name: value
            for name, value in vars(record).items()
            if name.endswith(("_bytes", "_s", "_tokens"))
        }


def _read(file: Path) -> None:
    buffer = bytearray(64 << 20)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def _check(engine: Engine, files: list[Path]) -> None:
    """Hold the head, and a layer's fused projections, against what safetensors itself reads."""
    model = engine._runner.model
    path = "model.layers.1.self_attn"
    names = ["lm_head.weight", *(f"{path}.{part}_proj.weight" for part in "qkv")]
    stored: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            here = set(tensors.keys()).intersection(names)
            stored |= {name: tensors.get_tensor(name) for name in here}
    head, *qkv = (stored[name].to(model.dtype) for name in names)
    assert torch.equal(model._head.cpu(), head), "lm_head is not the file's"
    assert torch.equal(model._layers[1].attention.qkv.weight.cpu(), torch.cat(qkv)), path


def main() -> None:
    """Write the checkpoint if there is none, and start one engine."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the model's folder")
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    folder = write_checkpoint(options.checkpoint, LLAMA_3_1_8B, torch.device(SETTINGS.device))
    took = measure(folder, SETTINGS)
    show(took)
    harness.write(options.json, facts, startup=took)


if __name__ == "__main__":
    main()
