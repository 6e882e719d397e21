"""How much FP8 and NF4 change a large model's logits, as a multiple of what bfloat16 changes.

python -m engine.benchmarks.quality --json quality.json [--layers 8]

Llama-3.1-8B's shapes with random weights in bfloat16, the same in all rows. The truth is float32:
torch's own products of these weights. An error is the root mean square of what logits are off, over
positions and vocabulary, as a share of the root mean square of the logits; beside it stands at how
many positions the likeliest token is the same. Of random logits the two likeliest lie nearer to one
another than a trained model's mostly do.

The engine's runner computes 32 sequences: their prompts in one step, then 16 steps of decodes, on
CUDA in graphs, each token given those before it. Adapters of rank 16 are on all linears.

How errors grow from layer to layer depends on the weights. These are GPT-2's at its start (Radford
et al. 2019, §2.3): hidden states begin at 1, and what layers add is divided by the root of their
number, so that all of them together add about as much. Queries and keys are larger, so that tokens
attend to some others and not to all alike. Without that division FP8's error of 32 layers, 512 wide
on a CPU, was 20% and 11 times bfloat16's instead of 4% and 2.7 times.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.benchmarks import harness
from engine.benchmarks.float32_llama import Float32Llama
from engine.benchmarks.offline import request_of
from engine.benchmarks.plain import PAGE, Answer, lease_of, sequences_of
from engine.benchmarks.random_adapters import (
    RandomBlobs,
    random_layout,
    random_scaling,
    random_tensors,
)
from engine.benchmarks.random_engine import RANK, SETTINGS
from engine.benchmarks.random_model import LLAMA_3_1_8B, RandomCheckpoint, write_config
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.execution.assembly import build_tiers
from lorikeet_engine.execution.batch_builder import build_step_input, group_by_adapter
from lorikeet_engine.execution.ranks import OneRank
from lorikeet_engine.execution.runner_parts import RunnerParts
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.kernels.attention.protocol import AttentionBackend
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.llama import LlamaModel
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.scheduling.sequence import Chunk
from lorikeet_engine.settings import EngineSettings

SEQUENCES, PROMPT, DECODES, ADAPTERS = 32, 240, 16, 8
KV_DTYPES: Mapping[str, Sequence[str]] = {
    "auto": ("auto", "fp8"),
    "fp8": ("auto", "fp8"),
    "nf4": ("auto",),
}
"""weight_dtype → the kv_dtypes that are measured with it; the first of all is bfloat16's own."""
_SHARPNESS = 2**0.5  # of queries and of keys: attention's scores deviate by 2 and not by 1
# Of bfloat16: beyond it something is wrong, or the model no sensible reference.
_SENSIBLE = 0.05
_ROWS = 1024  # of logits in float32 at a time


@dataclass(frozen=True, slots=True)
class Row:
    """The logits of one kind of steps.

    adapters: distinct ones in a step. error: a share of the logits. of_bf16: as a multiple of that
    with weights and KV in bfloat16. same_token: at how many positions, a share, the likeliest is.
    """

    weights: str
    kv: str
    adapters: int
    steps: str
    positions: int
    error: float
    of_bf16: float
    same_token: float


class DeepCheckpoint(RandomCheckpoint):
    """Random weights that let many layers carry errors on about as trained ones do."""

    def __init__(self, config: ModelConfig, settings: EngineSettings) -> None:
        super().__init__(torch.device(settings.device), settings.torch_dtype, settings.rounding)
        self._added = (2 * config.shape.layers) ** -0.5

    def deviation(self, name: str, cut: Cut) -> float:
        """The standard deviation of a matrix's numbers."""
        match name.split(".")[-2]:
            case "embed_tokens":
                return 1.0
            case "q_proj" | "k_proj":
                return super().deviation(name, cut) * _SHARPNESS
            case "o_proj" | "down_proj":
                return super().deviation(name, cut) * self._added
            case _:
                return super().deviation(name, cut)


@dataclass(slots=True)
class Sums:
    """What an error is made of, over the positions seen so far."""

    positions: int = 0
    squares: float = 0.0
    squares_off: float = 0.0
    same: int = 0

    def add(self, logits: torch.Tensor, truth: torch.Tensor) -> None:
        """Add some positions' logits [positions, vocabulary]."""
        self.positions += len(truth)
        self.squares += float(truth.square().sum())
        self.squares_off += float((logits.float() - truth).square().sum())
        self.same += int((logits.argmax(-1) == truth.argmax(-1)).sum())

    @property
    def error(self) -> float:
        """The root mean square of what logits are off, as a share of theirs."""
        return float((self.squares_off / self.squares) ** 0.5)


class Sample:
    """Sequences of random tokens, with adapters or without, and their true hidden states.

    refs: the adapters, dealt round; none: the base model computes all.
    """

    def __init__(
        self, truth: Float32Llama, config: ModelConfig, refs: Sequence[AdapterRef]
    ) -> None:
        rng = np.random.default_rng(1)
        self.tokens = rng.integers(0, config.vocab_size, (SEQUENCES, PROMPT + DECODES))
        chosen = [i % len(refs) for i in range(SEQUENCES)] if refs else []
        self.refs: list[AdapterRef | None] = [refs[i] for i in chosen] or [None] * SEQUENCES
        scalings = [random_scaling(i) for i in chosen] or [0.0] * SEQUENCES
        device = truth.device
        tokens = torch.from_numpy(self.tokens).to(device)
        self._hidden = truth.hidden(tokens, torch.tensor(scalings, device=device))
        self._truth = truth

    def compare(self, runner: ModelRunner, tiers: Tiers) -> Iterator[tuple[str, Sums]]:
        """What the runner's prompts, then its decodes, are off; by the kind of step."""
        answers = [
            Answer(request_of(str(i), ids[:PROMPT], DECODES + 1, ref, ""), [*ids[PROMPT:], 0])
            for i, (ids, ref) in enumerate(zip(self.tokens.tolist(), self.refs, strict=True))
        ]
        running = sequences_of(answers, len(runner.kv_windows))
        index = {sequence: i for i, sequence in enumerate(running)}
        for sequence in running:
            if sequence.adapter is not None:
                sequence.lease = lease_of(tiers, sequence.adapter)
        for name, length, steps in (("prompts", PROMPT, 1), ("decodes", 1, DECODES)):
            sums = Sums()
            for _ in range(steps):
                chunks = group_by_adapter([Chunk.of(sequence, length) for sequence in running])
                logits = _logits(runner, chunks)
                states = [self._hidden[index[c.sequence], c.start : c.end] for c in chunks]
                for some, of_some in zip(
                    logits.split(_ROWS), torch.cat(states).split(_ROWS), strict=True
                ):
                    sums.add(some, self._truth.logits(of_some))
                for sequence in running:
                    sequence.kv.computed += length
            yield name, sums
        for sequence in running:
            if sequence.lease is not None:
                sequence.lease.release()


def measure(folder: Path, settings: EngineSettings, config: Mapping[str, Any]) -> Iterator[Row]:
    """All rows. folder: for files. settings: all but folders, weight_dtype, kv_dtype and adapters.

    Raises AssertionError where bfloat16's own error is no sensible one.
    """
    settings = _settings(folder, settings, config)
    model_config = ModelConfig.from_folder(settings.model, settings.max_context)
    blobs = RandomBlobs(folder / "blobs", model_config.shape, ADAPTERS, RANK)
    own: dict[tuple[int, str], float] = {}
    samples: list[Sample] = []
    with _tiers(settings, model_config.shape, blobs) as tiers:
        for weights, kv_dtypes in KV_DTYPES.items():
            rounded = replace(settings, weight_dtype=weights)
            model = LlamaModel(model_config, DeepCheckpoint(model_config, rounded))
            if not samples:
                attention = _attention(model, tiers, settings)
                truth = _truth(model_config, settings)
                samples = [Sample(truth, model_config, refs) for refs in ((), blobs.refs)]
            for kv in kv_dtypes:
                asked = replace(rounded, kv_dtype=kv)
                parts = RunnerParts(model, attention[kv], tiers.weights, asked)
                runner = parts.build(SEQUENCES * -(-(PROMPT + DECODES) // PAGE))
                for sample in samples:
                    yield from _rows(sample, runner, tiers, asked, own)
                del parts, runner
            del model
            harness.empty_device()


def _rows(
    sample: Sample,
    runner: ModelRunner,
    tiers: Tiers,
    settings: EngineSettings,
    own: dict[tuple[int, str], float],
) -> Iterator[Row]:
    """The rows of one sample. own: errors of bfloat16, by adapters and steps, noted when first."""
    adapters = len(set(sample.refs) - {None})
    for steps, sums in sample.compare(runner, tiers):
        own_error = own.setdefault((adapters, steps), sums.error)
        assert own_error < _SENSIBLE, f"bfloat16's own error is {own_error:.1%}"
        yield Row(
            "bf16" if settings.weight_dtype == "auto" else settings.weight_dtype,
            "bf16" if settings.kv_dtype == "auto" else settings.kv_dtype,
            adapters,
            steps,
            sums.positions,
            sums.error,
            1.0 if sums.error == own_error else sums.error / own_error,
            sums.same / sums.positions,
        )


def _logits(runner: ModelRunner, chunks: list[Chunk]) -> torch.Tensor:
    """Logits of all tokens of a step of these chunks, in their order."""
    step = build_step_input(chunks, PAGE, runner.kv_windows)
    step = replace(step, logit_rows=np.arange(len(step.token_ids)))
    runner.share(step)
    return runner.forward(step.upload(runner.model.device))


def _attention(
    model: LlamaModel, tiers: Tiers, settings: EngineSettings
) -> dict[str, AttentionBackend]:
    """Attention for each kv_dtype, whose kernels are compiled in the background."""
    asked = {kv: replace(settings, kv_dtype=kv) for kv in ("auto", "fp8")}
    return {
        kv: RunnerParts.of(model, tiers.weights, of_kv).attention for kv, of_kv in asked.items()
    }


def _truth(config: ModelConfig, settings: EngineSettings) -> Float32Llama:
    linears = [linear.name for linear in config.shape.linears]
    adapter = random_tensors(config.shape, RANK, linears)
    return Float32Llama(config, DeepCheckpoint(config, settings), adapter)


def _settings(folder: Path, settings: EngineSettings, config: Mapping[str, Any]) -> EngineSettings:
    """With room for the adapters, and graphs for steps of decodes alone."""
    layout = random_layout(BaseShape.from_config(config), RANK)
    itemsize = settings.torch_adapter_dtype.itemsize
    return replace(
        settings,
        model=write_config(folder / "model", config),
        cache_dir=folder / "cache",
        max_batch_tokens=SEQUENCES,
        max_running=SEQUENCES,
        max_batch_adapters=ADAPTERS,
        adapter_gpu_bytes=ADAPTERS * layout.elements * itemsize,
        adapter_host_bytes=ADAPTERS * layout.image_elements * itemsize,
    )


@contextmanager
def _tiers(settings: EngineSettings, shape: BaseShape, blobs: RandomBlobs) -> Iterator[Tiers]:
    device = torch.device(settings.device)
    tiers = build_tiers(shape, settings, blobs, device, lambda: None, 0, OneRank())
    try:
        yield tiers
    finally:
        tiers.close()


def main() -> None:
    """Measure all rows."""
    parser = harness.arguments(__doc__)
    layers = LLAMA_3_1_8B["num_hidden_layers"]
    parser.add_argument("--layers", type=int, default=layers, help="of the model")
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    config = LLAMA_3_1_8B | {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        rows = harness.show(measure(Path(folder), SETTINGS, config))
    harness.write(options.json, facts, layers=options.layers, quality=rows)


if __name__ == "__main__":
    main()
