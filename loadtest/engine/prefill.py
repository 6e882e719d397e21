"""Prefill steps: share of the device's matmul rate at 8 × 1,024 tokens, and time that LoRA adds.

python -m loadtest.engine.prefill --json prefill.json [--weight-dtype fp8]

The steps are the engine's own, each of all prompts at once. The operations of the base model's
products are counted: linear layers, the head for one token per sequence, and attention for the
visible pairs. Their rate is compared with one large square matmul of random numbers in the
activations' dtype, measured in the same run; with FP8 weights the share can exceed 1. Prints a row
for each work.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch

from loadtest.engine import harness
from loadtest.engine.gpu_time import GpuTime, gpu_time, medians_ms, watch
from loadtest.engine.offline import Run, Work, generate
from loadtest.engine.random_adapters import Targets
from lorikeet_engine.engine import Engine
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.llama import LlamaModel

STEPS = 10
SQUARE = 8192  # rows and columns of the matmul
WORKS = (
    Work("base", 1024, 1, requests=8),
    Work("8 adapters", 1024, 1, adapters=8, requests=8),
    Work("8 adapters with lm_head", 1024, 1, adapters=8, requests=8, on=Targets.LINEARS_AND_HEAD),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Prefill step of a work, which is a set of requests that are submitted at once.

    step_ms: time from submission to the tokens, median of STEPS.
    tflops: rate of the model's products on the GPU; without a GPU, over the whole step.
    matmul_tflops: rate of the large matmul.
    share: tflops as a share of matmul_tflops.
    shortfall: largest amount by which a checked token's logit is below the plain path's best, as a
        share of the largest absolute logit.
    gpu: the GPU's time in a further step; None without a GPU.
    """

    work: Work
    step_ms: float
    tflops: float
    matmul_tflops: float
    share: float
    shortfall: float
    gpu: GpuTime | None


def measure(engine: Engine, work: Work) -> Row:
    """Check the tokens that the engine generates for a set of requests, then time its prefill step.

    Raises AssertionError if the engine's tokens are wrong.
    """
    shortfall = harness.check(engine, work)
    runs = [_step(engine, work, run) for run in range(1, 1 + STEPS)]
    step_ms, gpu = median(1e3 * (run.ticks_s[0] - run.began_s) for run in runs), None
    if torch.cuda.is_available():
        watch(lambda: _step(engine, work, 1))  # the profiler's first steps are slow
        gpu = gpu_time(watch(lambda: _step(engine, work, 2)), 1)
    model, forward_ms = engine._runner.model, gpu.total_ms if gpu else step_ms
    tflops = flops(model.config, work.requests, work.prompt_tokens) / forward_ms / 1e9
    matmul_tflops = _matmul_tflops(model)
    share = tflops / matmul_tflops
    return Row(work, step_ms, tflops, matmul_tflops, share, shortfall, gpu)


def measure_all(engine: Engine, works: Iterable[Work]) -> list[Row]:
    """Measure sets of requests in order; print each row as it is measured."""
    return harness.show(measure(engine, work) for work in works)


def flops(config: ModelConfig, sequences: int, tokens: int) -> int:
    """Return the operations of a forward pass of whole prompts; a multiply and an add are two.

    sequences, tokens: number of prompts, and tokens of each.
    """
    c, layers = config.shape, 0
    products = [
        math.prod(c.dims(n)) * (config.experts_per_token if linear.of_experts else 1)
        for n, linear in enumerate(c.linears)
    ]
    for layer, window in enumerate(config.windows):
        layers += tokens * sum(each for n, each in enumerate(products) if c.has(layer, n))
        layers += 2 * _pairs(tokens, window) * c.heads * c.heads_of(layer).head_dim
    return 2 * sequences * (layers + c.hidden * config.vocab_size)


def _pairs(tokens: int, window: int | None) -> int:
    """Return the number of pairs of a query and a key that it sees, for a prompt in a layer with
    this window.
    """
    within = min(tokens, window or tokens)
    return within * (within + 1) // 2 + (tokens - within) * within


def _step(engine: Engine, work: Work, run: int) -> Run:
    done = generate(engine, work.draw(engine.info.vocab_size, run))
    assert len(done.ticks_s) == 1, f"{work.label} took {len(done.ticks_s)} steps"
    return done


def _matmul_tflops(model: LlamaModel) -> float:
    x = torch.randn(SQUARE, SQUARE, device=model.device, dtype=model.dtype)
    (took_ms,) = medians_ms([lambda: x @ x], STEPS)
    return 2 * SQUARE**3 / took_ms / 1e9


if __name__ == "__main__":
    harness.run(__doc__, "prefill", WORKS, measure_all)
