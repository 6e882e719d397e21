"""Decode steps: time of a step, and the GPU's time by kind of kernel, at 1 to 256 requests.

python -m loadtest.engine.decode --json decode.json [--config qwen3-8b] [--weight-dtype fp8]
    [--kv-dtype fp8] [--tensor-parallel 2] [--rows 'base*']

The steps are the engine's own, including the work of the CPU. Steps are timed without the profiler;
the GPU's time is that of further, profiled steps. Prints a row for each work.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch

from loadtest.engine import harness
from loadtest.engine.gpu_time import GpuTime, gpu_time, watch
from loadtest.engine.offline import Work, abort, begin, steps_ms
from loadtest.engine.random_adapters import Targets
from lorikeet_engine.engine import Engine

STEPS = 30
# The first profiled steps are slow: the profiler has not yet seen the graphs.
_WARM_UP = 5

# 128 output tokens: no request ends before the last step is profiled.
WORKS = (
    Work("base, alone", 16, 512, requests=1),
    Work("1 adapter, alone", 16, 512, adapters=1, requests=1),
    Work("base, alone", 256, 128, requests=1),
    Work("base, 32", 256, 128, requests=32),
    Work("32 adapters, 32", 256, 128, adapters=32, requests=32),
    Work("base, 128", 256, 128, requests=128),
    Work("base", 256, 128),
    Work("8 adapters", 256, 128, adapters=8),
    Work("32 adapters", 256, 128, adapters=32),
    Work("128 adapters", 256, 128, adapters=128),
    Work("128 adapters with lm_head", 256, 128, adapters=128, on=Targets.LINEARS_AND_HEAD),
    Work("128 adapters with DoRA", 256, 128, adapters=128, on=Targets.DORA),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Decode steps of a work, which is a set of requests that run at once.

    step_ms: median time of a step.
    layer_ms: step_ms divided by the number of layers.
    shortfall: largest amount by which a checked token's logit is below the plain path's best, as a
        share of the largest absolute logit.
    gpu: the GPU's time over STEPS further steps; None without a GPU.
    """

    work: Work
    step_ms: float
    layer_ms: float
    shortfall: float
    gpu: GpuTime | None


def measure(engine: Engine, work: Work) -> Row:
    """Check the tokens that the engine generates for a set of requests, then time its decode steps.

    Raises AssertionError if the engine's tokens are wrong.
    """
    shortfall = harness.check(engine, work)
    requests = work.draw(engine.info.vocab_size, 1)
    for request in requests:
        engine.submit(request)
    begin(engine, requests)
    count = STEPS if work.requests > 1 else work.output_tokens // 2
    step_ms, gpu = median(steps_ms(engine, count)), None
    if torch.cuda.is_available():
        watch(lambda: steps_ms(engine, _WARM_UP))
        gpu = gpu_time(watch(lambda: steps_ms(engine, STEPS)), STEPS)
    assert engine.status().live.running == work.requests, (
        f"{work.label}: some requests ended too early"
    )
    abort(engine, requests)
    layers = engine._runner.model.config.shape.layers
    return Row(work, step_ms, step_ms / layers, shortfall, gpu)


def measure_all(engine: Engine, works: Iterable[Work]) -> list[Row]:
    """Measure sets of requests in order; print each row as it is measured."""
    return harness.show(measure(engine, work) for work in works)


if __name__ == "__main__":
    harness.run(__doc__, "decode", WORKS, measure_all)
