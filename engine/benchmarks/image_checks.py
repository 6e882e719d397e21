"""What it costs to check resident images now and then, as a share of decode steps.

python -m engine.benchmarks.image_checks --json image_checks.json [--config qwen3-8b]

Too little to be seen in the time of steps, so its two parts are timed themselves: what the engine's
thread does in the steps that check, in processor time, and how long the sums take, alone: on a GPU
between steps, on a CPU on another thread. The other steps only count; to ask the time in each of
them would cost more than that.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import mean

from engine.benchmarks import harness
from engine.benchmarks.gpu_time import medians_ms
from engine.benchmarks.offline import Work, abort, begin, steps_ms
from lorikeet_engine.adapter import Residency
from lorikeet_engine.engine import Engine
from lorikeet_engine.residency.checksums import word_sum
from lorikeet_engine.residency.image_checks import EVERY_STEPS, ImageChecks

STEPS = 4 * EVERY_STEPS
_SUMS = 20

WORKS = (
    Work("1 adapter, alone", 16, 1100, adapters=1, requests=1),
    Work("128 adapters, 16 requests", 16, 1100, adapters=128, requests=16),
    Work("128 adapters, 128 requests", 16, 1100, adapters=128, requests=128),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One Work's decode steps; microseconds of each step on the average, and their share of it.

    thread_us: the engine's thread, for checks of GPU and host. gpu_us: the sums of the GPU's arena.
    """

    work: Work
    step_ms: float
    thread_us: float
    gpu_us: float
    share: float


def measure(engine: Engine, work: Work) -> Row:
    """Time STEPS steps of decodes, and sums of the images that are checked meanwhile."""
    requests = work.draw(engine.info.vocab_size, 1)
    for request in requests:
        engine.submit(request)
    begin(engine, requests)
    checks = engine._tiers._checks
    with _timed(checks) as took_s:
        step_ms = mean(steps_ms(engine, STEPS))
    assert engine.status().live.running == work.requests, f"{work.label}: some ended too early"
    abort(engine, requests)
    thread_us, gpu_us = 1e6 * sum(took_s) / STEPS, 1e3 * _sum_ms(checks) / EVERY_STEPS
    return Row(work, step_ms, thread_us, gpu_us, (thread_us + gpu_us) / (1e3 * step_ms))


def measure_all(engine: Engine, works: Iterable[Work]) -> list[Row]:
    """Measure in this order; prints each row as it comes."""
    return harness.show(measure(engine, work) for work in works)


@contextmanager
def _timed(checks: ImageChecks) -> Iterator[list[float]]:
    """The processor time that each check takes the engine's thread, until the block ends."""
    step, took_s = checks.step, list[float]()

    def timed() -> None:
        checking = (checks._steps + 1) % EVERY_STEPS == 0
        began_s = time.thread_time() if checking else 0.0
        step()
        if checking:
            took_s.append(time.thread_time() - began_s)

    checks.step = timed  # type: ignore[method-assign]
    try:
        yield took_s
    finally:
        checks.step = step  # type: ignore[method-assign]


def _sum_ms(checks: ImageChecks) -> float:
    """The time of one slice's sum on the GPU, the mean over some."""
    parts = [next(checks._rounds[Residency.GPU]) for _ in range(_SUMS)]
    sums = [partial(word_sum, part.elements) for part in parts if part is not None]
    return mean(medians_ms(sums, 5))


if __name__ == "__main__":
    harness.run(__doc__, "image_checks", WORKS, measure_all)
