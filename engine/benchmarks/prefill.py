"""Prefill: how near a forward pass of 8 × 1,024 tokens comes to the device's matmul rate.

python -m engine.benchmarks.prefill --json prefill.json

The base model alone, as an engine's runner computes it. Counted are the products of the linear
layers, of the head for one token a sequence, and of attention for what a query can see. They are
held against one large square matmul of random numbers, measured in the same run.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from engine.benchmarks import plain, results
from engine.benchmarks.random_engine import SETTINGS
from engine.benchmarks.random_model import random_model, write_config
from lorikeet_engine.batch import Batch
from lorikeet_engine.kernels.attention import (
    AttentionBackend,
    AttentionShape,
    SdpaAttention,
    choose_attention,
)
from lorikeet_engine.models import Model, ModelConfig
from lorikeet_engine.runner import Runner

PAGE = 16
# Sequences, tokens of each, rows and columns of the matmul.
SIZES = (8, 1024, 8192)


@dataclass(frozen=True, slots=True)
class Row:
    """One prefill. tflops: the model's rate; share: of matmul_tflops, the large matmul's.

    difference: from the plain path's logits, as a share of the largest.
    """

    sequences: int
    tokens: int
    forward_ms: float
    tflops: float
    matmul_tflops: float
    share: float
    difference: float


def measure(model: Model, sequences: int, tokens: int, square: int) -> Row:
    """Check, then time; raises AssertionError where the logits are wrong. Prints the row."""
    c = model.config
    shape = AttentionShape(c.heads, c.kv_heads, c.head_dim, PAGE, model.dtype)
    batch = _prompts(model, sequences, tokens)
    runner = _runner(model, choose_attention(shape, model.device), batch)
    difference = _difference(runner.forward(batch), _runner(model, SdpaAttention(), batch), batch)
    x = torch.randn(square, square, device=model.device, dtype=model.dtype)
    matmul_ms = _median_ms(lambda: x @ x, model.device)
    forward_ms = _median_ms(lambda: runner.forward(batch), model.device)
    tflops = flops(c, sequences, tokens) / forward_ms / 1e9
    matmul_tflops = 2 * square**3 / matmul_ms / 1e9
    share = tflops / matmul_tflops
    row = Row(sequences, tokens, forward_ms, tflops, matmul_tflops, share, difference)
    print(
        f"prefill {sequences} × {tokens}: {row.forward_ms:.1f} ms, {row.tflops:.0f} TFLOP/s, "
        f"{row.share:.0%} of {row.matmul_tflops:.0f} of a matmul of {square}",
        flush=True,
    )
    return row


def flops(config: ModelConfig, sequences: int, tokens: int) -> int:
    """Of one forward pass of whole prompts, two for each multiply and add."""
    c = config
    width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
    linears = c.hidden * (2 * width + 2 * kv_width + 3 * c.intermediate)
    seen = tokens * (tokens + 1) // 2  # pairs of a query and a key
    layer = sequences * (tokens * linears + 2 * seen * width)
    return 2 * (c.layers * layer + sequences * c.hidden * c.vocab_size)


def main() -> None:
    """Measure on the first CUDA device."""
    options = results.arguments(__doc__).parse_args()
    facts = results.facts(options.commit)
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder) / "model")
        device = torch.device(SETTINGS.device)
        model = random_model(config, device, SETTINGS.torch_dtype, SETTINGS.max_context)
    results.write(options.json, facts, prefill=[asdict(measure(model, *SIZES))])


def _prompts(model: Model, sequences: int, tokens: int) -> Batch:
    """Whole random prompts, each in pages of its own; the logits of the last tokens are wanted."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (sequences * tokens,), generator=random)
    pages = -(-tokens // PAGE)
    positions = torch.arange(tokens).repeat(sequences)
    slots = torch.arange(sequences * pages * PAGE).view(sequences, -1)[:, :tokens].flatten()
    ends = torch.arange(1, sequences + 1) * tokens
    return Batch(
        token_ids=ids.to(model.device),
        positions=positions.to(model.device),
        kv_slots=slots.to(model.device),
        query_starts=(0, *ends.tolist()),
        kv_lengths=(tokens,) * sequences,
        page_tables=torch.arange(sequences * pages, dtype=torch.int32).view(sequences, pages),
        logit_rows=(ends - 1).to(model.device),
        segments=None,
    )


def _runner(model: Model, attention: AttentionBackend, batch: Batch) -> Runner:
    c = model.config
    shape = (c.layers, 2, batch.page_tables.numel(), PAGE, c.kv_heads, c.head_dim)
    kv = torch.zeros(shape, device=model.device, dtype=model.dtype)
    return Runner(model, attention, None, kv)


def _difference(got: torch.Tensor, plain_runner: Runner, batch: Batch) -> float:
    want = plain_runner.forward(batch).float()
    difference = float((got.float() - want).abs().max() / want.abs().max())
    most = plain.tolerance(plain_runner.model.dtype)
    assert difference <= most, f"logits are {difference:.4f} from the plain path's: want {most:.4f}"
    return difference


def _median_ms(compute: Callable[[], object], device: torch.device) -> float:
    """Of ten times: by CUDA's events, on a CPU by the clock."""
    compute()
    time_ms = _cuda_ms if device.type == "cuda" else _clock_ms
    return median(time_ms(compute) for _ in range(10))


def _cuda_ms(compute: Callable[[], object]) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    compute()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _clock_ms(compute: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    compute()
    return 1e3 * (time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
