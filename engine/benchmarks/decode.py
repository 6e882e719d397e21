"""Decode steps: a token's time with one request, and what the GPU does in steps of 256.

python -m engine.benchmarks.decode --json decode.json

The steps are the engine's own, with all its work on the host. A step's time is taken without the
profiler; the GPU's time is that of other steps.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from engine.benchmarks import harness
from engine.benchmarks.gpu_time import GpuTime, gpu_time, watch
from engine.benchmarks.offline import Work
from lorikeet_engine.engine import Engine

STEPS = 30
# The profiler's first steps are slow: it has yet to learn the graphs.
_WARM_UP = 5

# 128 tokens out: enough that nobody ends before the last step is profiled.
WORKS = (
    Work("base, alone", 16, 512, requests=1),
    Work("1 adapter, alone", 16, 512, adapters=1, requests=1),
    Work("base", 256, 128),
    Work("8 adapters", 256, 128, adapters=8),
    Work("128 adapters", 256, 128, adapters=128),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One Work's decode steps: the median's time; the GPU's over STEPS others, where there is one.

    shortfall: the worst of a checked token, as a share of the largest logit.
    """

    work: Work
    step_ms: float
    shortfall: float
    gpu: GpuTime | None


def measure(engine: Engine, work: Work) -> Row:
    """Check, then time; raises AssertionError where the engine's tokens are wrong."""
    shortfall = harness.check(engine, work)
    requests = work.draw(engine.info.vocab_size, 1)
    for request in requests:
        engine.submit(request)
    begun: set[str] = set()
    while len(begun) < len(requests):
        engine.wait(1.0)
        begun |= {output.request_id for output in engine.step()}
    count = STEPS if work.requests > 1 else work.output_tokens // 2
    step_ms, gpu = median(_step(engine, count)), None
    if torch.cuda.is_available():
        watch(lambda: _step(engine, _WARM_UP))
        gpu = gpu_time(watch(lambda: _step(engine, STEPS)), STEPS)
    assert engine.status().live.running == work.requests, f"{work.label}: some ended too early"
    for request in requests:
        engine.abort(request.request_id)
    engine.step()
    return Row(work, step_ms, shortfall, gpu)


def measure_all(engine: Engine, works: Iterable[Work]) -> list[Row]:
    """Measure in this order; prints each row as it comes."""
    return harness.show(measure(engine, work) for work in works)


def _step(engine: Engine, count: int) -> list[float]:
    """Take `count` steps; the times in milliseconds from one step's tokens to the next's."""
    ticks_s = []
    for _ in range(count):
        assert engine.step(), "a step of decodes without tokens"
        ticks_s.append(time.perf_counter())
    return [1e3 * (end - begin) for begin, end in pairwise(ticks_s)]


if __name__ == "__main__":
    harness.run(__doc__, "decode", WORKS, measure_all)
