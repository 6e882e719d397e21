"""Step costs: error of the step times that the engine predicts from its measurement at start.

python -m loadtest.engine.step_costs --json step_costs.json [--kv-dtype fp8]

Decode steps by number and context, steps of one prompt chunk by depth, and steps of a chunk beside
decodes, as far as they fit into the KV pages, which hold random numbers. Each step is a forward
pass of dummy sequences, as in the measurement at start; almost all these steps differ from the
steps measured at start. Prints a row for each step and the worst error; the JSON also has the
stages of the start, among them the time of the measurement.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from loadtest.engine import harness
from loadtest.engine.offline import Work
from loadtest.engine.random_engine import SETTINGS
from lorikeet_engine.costs import StepCosts, seen_tokens
from lorikeet_engine.device.memory import MemoryShare
from lorikeet_engine.engine import Engine
from lorikeet_engine.execution.step_timer import StepTimer
from lorikeet_engine.execution.warm_up import random_kv

# The product's defaults: whole contexts, and all the KV pages that fit.
LONG_CONTEXTS = replace(
    SETTINGS, max_context=None, max_batch_tokens=2048, kv_bytes=MemoryShare(0.9)
)
ADAPTERS = 32  # with room for adapters, the cost of ranks is measured too
CHECKED = Work("base", 256, 8, requests=8)
_TIMES = 3


@dataclass(frozen=True, slots=True)
class Point:
    """Step of decodes and a prompt chunk.

    decodes: number of decodes.
    context: tokens that each decode sees.
    chunk: tokens of the prompt chunk.
    depth: tokens before the chunk.
    """

    decodes: int = 0
    context: int = 0
    chunk: int = 0
    depth: int = 0

    @property
    def label(self) -> str:
        """Step in words."""
        parts = []
        if self.decodes:
            parts.append(f"{self.decodes} decodes of {self.context:,}")
        if self.chunk:
            parts.append(f"a chunk of {self.chunk:,} at {self.depth:,}")
        return " and ".join(parts)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values the step needs."""
        return self.decodes * self.context + self.chunk + self.depth

    def predicted_s(self, costs: StepCosts) -> float:
        """Return the predicted seconds of the step."""
        return costs.step_s(
            self.decodes + self.chunk,
            0,
            self.decodes * costs.decode_sees(self.context),
            seen=seen_tokens(self.chunk, self.depth),
        )


_DEPTHS = (0, 8192, 32_768, 65_536, 122_880)
POINTS = (
    *(Point(n, at) for n in (1, 4, 16, 64, 128, 256) for at in (256, 1024, 4096, 16_384, 32_768)),
    *(Point(n, 131_072) for n in (1, 4)),
    Point(256, 320),
    Point(64, 8192),
    *(Point(chunk=n, depth=at) for n in (128, 512, 2048) for at in _DEPTHS),
    *(Point(64, 1024, 192, at) for at in _DEPTHS),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Step as predicted, and as measured (median of a few times).

    error: relative error of the prediction.
    """

    step: Point
    predicted_ms: float
    measured_ms: float
    error: float


def measure_all(engine: Engine, points: Iterable[Point]) -> list[Row]:
    """Check, then time the points that fit, in order; print each row as it is measured.

    Raises AssertionError if the engine's tokens are wrong.
    """
    harness.check(engine, CHECKED)
    steps = StepTimer(engine._runner, engine._kv_pages, engine._settings)
    context = engine.info.max_context
    fitting = [
        point
        for point in points
        if point.kv_tokens <= steps.kv_tokens
        and max(point.context, point.depth + point.chunk) <= context
        and point.decodes <= engine._settings.max_running
    ]
    with random_kv(engine._runner.kv):
        return harness.show(_measure(engine.info.step_costs, steps, point) for point in fitting)


def worst(rows: Iterable[Row]) -> Row:
    """Return the row with the largest absolute error."""
    return max(rows, key=lambda row: abs(row.error))


def main() -> None:
    """Start an engine with long contexts, and measure the points that fit."""
    parser = harness.arguments(__doc__)
    harness.add_kv_dtype(parser)
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    settings = replace(LONG_CONTEXTS, kv_dtype=options.kv_dtype)
    with (
        _start_up() as start,
        harness.full_engine(adapters=ADAPTERS, room=ADAPTERS, settings=settings) as engine,
    ):
        print(*(f"{name} {value}" for name, value in start.items()), sep=", ")
        costs = engine.info.step_costs
        rows = measure_all(engine, POINTS)
    off = worst(rows)
    print(f"{len(rows)} points, the worst {100 * off.error:+.1f}%: {off.step.label}")
    asked = {"kv_dtype": options.kv_dtype, "start": start}
    harness.write(options.json, facts, **asked, costs=costs, step_costs=rows, worst=off.step.label)


def _measure(costs: StepCosts, steps: StepTimer, point: Point) -> Row:
    chunks = steps.decodes(point.decodes, point.context)
    if point.chunk:
        chunks.append(steps.prompt(point.chunk, point.depth))
    predicted_ms = 1e3 * point.predicted_s(costs)
    measured_ms = 1e3 * median(steps.shortest_s(chunks) for _ in range(_TIMES))
    return Row(point, predicted_ms, measured_ms, predicted_ms / measured_ms - 1)


@contextmanager
def _start_up() -> Iterator[dict[str, Any]]:
    """Yield the stages of an engine's start, in bytes and seconds, filled as the engine starts."""
    facts: dict[str, Any] = {}

    class Assembled(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg == "engine_assembled":
                of_stages = ("_s", "_bytes", "kv_tokens")
                facts.update({k: v for k, v in vars(record).items() if k.endswith(of_stages)})

    handler, logger = Assembled(), logging.getLogger("lorikeet_engine.execution.assembly")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield facts
    finally:
        logger.removeHandler(handler)


if __name__ == "__main__":
    main()
