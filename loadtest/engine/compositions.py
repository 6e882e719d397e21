"""Decode steps of composed adapters, beside those of single adapters with as many ranks in all.

python -m loadtest.engine.compositions --json compositions.json [--config qwen3-8b]

Each request has an adapter of rank 32 of its own, or a composition of two adapters of rank 16 that
no other request names: both read the same number of bytes. Runs with single adapters and runs with
compositions alternate. Prints a row for each number of requests.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from loadtest.engine import harness, plain
from loadtest.engine.offline import Work, abort, begin, generate, steps_ms
from loadtest.engine.random_adapters import EmptySource, fill_host, random_layout, random_refs
from loadtest.engine.random_engine import roomy_engine
from loadtest.engine.random_model import shape_of
from lorikeet_engine.adapter import Adapter, Composition
from lorikeet_engine.engine import Engine
from lorikeet_engine.request import Request

RANK = 16
STEPS = 50
TURNS = 3
WORKS = tuple(Work("requests", 256, 256, requests=count) for count in (1, 8, 32, 128))


@dataclass(frozen=True, slots=True)
class Row:
    """Decode steps of one number of requests.

    single_ms, composed_ms: median time of a step with single adapters and with compositions.
    ratio: composed_ms as a multiple of single_ms.
    shortfall: largest amount by which a checked token's logit is below the plain path's best, as a
        share of the largest absolute logit.
    """

    work: Work
    single_ms: float
    composed_ms: float
    ratio: float
    shortfall: float


def measure(
    engine: Engine, work: Work, single: Sequence[Adapter], composed: Sequence[Adapter]
) -> Row:
    """Check tokens of both kinds of adapters, then time decode steps of each by turns.

    single, composed: an adapter for each request at least.

    Raises AssertionError if the engine's tokens are wrong.
    """
    answers = generate(engine, _requests(engine, work, composed, 0)).answers
    shortfall = plain.check(engine, plain.some(answers))
    generate(engine, _requests(engine, work, single, 0))
    times: list[tuple[float, float]] = []
    for turn in range(1, TURNS + 1):
        one, two = (_step_ms(engine, work, each, turn) for each in (single, composed))
        times.append((one, two))
    single_ms, composed_ms = map(median, zip(*times, strict=True))
    return Row(work, single_ms, composed_ms, composed_ms / single_ms, shortfall)


def main() -> None:
    """Measure all rows on one engine."""
    parser = harness.arguments(__doc__)
    harness.add_model_arguments(parser)
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    model = harness.model_of(options)
    most = max(work.requests for work in WORKS)
    settings = replace(model["settings"], max_rank=2 * RANK, max_batch_adapters=2 * most)
    with tempfile.TemporaryDirectory() as folder:
        engine, layout = roomy_engine(
            Path(folder),
            EmptySource(),
            2 * most,
            2 * most,
            model["config"],
            settings,
            rank=2 * RANK,
        )
        refs = random_refs(3 * most)
        fill_host(engine._tiers, layout, refs[:most])
        fill_host(engine._tiers, random_layout(shape_of(model["config"]), RANK), refs[most:])
        pairs = zip(refs[most::2], refs[most + 1 :: 2], strict=True)
        composed = [Composition(pair, (1.0, 1.0)) for pair in pairs]
        try:
            rows = harness.show(measure(engine, work, refs[:most], composed) for work in WORKS)
        finally:
            engine.close()
    harness.write(options.json, facts, **harness.about(options), compositions=rows)


def _step_ms(engine: Engine, work: Work, adapters: Sequence[Adapter], run: int) -> float:
    requests = _requests(engine, work, adapters, run)
    for request in requests:
        engine.submit(request)
    begin(engine, requests)
    step_ms = median(steps_ms(engine, STEPS))
    abort(engine, requests)
    return step_ms


def _requests(engine: Engine, work: Work, adapters: Sequence[Adapter], run: int) -> list[Request]:
    drawn = work.draw(engine.info.vocab_size, run)
    return [replace(each, adapter=adapters[i]) for i, each in enumerate(drawn)]


if __name__ == "__main__":
    main()
