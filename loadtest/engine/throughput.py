"""Offline throughput: tokens per second of many requests at once, with random weights.

python -m loadtest.engine.throughput --json results.json --rows 'base*' '128 adapters*'

A row is one greedy run that is checked and, in turns, two greedy and two sampled runs that are
timed, all with different prompts, so that the prefix cache holds none. The check compares tokens
with a plain forward pass (plain.py). The engine has its LoRA path on in every row, and room on the
GPU for the adapters of all rows, but at most 128. Prints a row for each work.

The Zipf row, which runs only if named, has its 1,000 adapters of rank 16 on the host: 84 GB of
pinned memory. --population takes fewer on a machine with less memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from loadtest.engine import harness, plain
from loadtest.engine.offline import Run, Work, generate
from loadtest.engine.random_adapters import Targets, empty_device
from lorikeet.simulator.workload_models import Zipf
from lorikeet_engine.engine import Engine
from lorikeet_engine.request import SamplingParams

ROOM = 128
TURNS = 2
SAMPLED = SamplingParams(temperature=1.0)  # the default of OpenAI's API

WORKS = (
    Work("base", 256, 128),
    Work("1 adapter", 256, 128, 1),
    Work("8 adapters", 256, 128, 8),
    Work("32 adapters", 256, 128, 32),
    Work("128 adapters", 256, 128, 128),
    Work("128 cold", 256, 128, 128, cold=True),
    Work("base", 16, 256),
    Work("128 adapters", 16, 256, 128),
)

OF_MIXTURES = (
    *(Work(f"{count} on attention", 256, 128, count, on=Targets.ATTENTION) for count in (8, 128)),
    *(Work(f"{count} shared outer", 256, 128, count, on=Targets.SHARED_OUTER) for count in (8, 32)),
)
"""Works for mixtures of experts, whose adapters on experts take gigabytes; run only if named."""


def zipf(population: int) -> Work:
    """Return 1,024 requests, 256 at a time, over more adapters than the GPU has room for.

    population: number of adapters.
    """
    return Work(f"zipf {population}", 256, 128, population, 1024, Zipf(1.0), cold=True)


@dataclass(frozen=True, slots=True)
class Row:
    """Greedy and sampled runs of a work, which is a set of requests.

    tokens_per_s, sampled_tokens_per_s: rate of each timed run.
    step_ms, sampled_step_ms: median step in the second half of the first run.
    of_greedy: sampled rate as a share of the greedy rate beside it, median.
    shortfall: largest amount by which a checked token's logit is below the plain path's best, as a
        share of the largest absolute logit.
    of_base: first greedy rate as a share of the base model's rate at these lengths; None if the
        base model was not measured before.
    """

    work: Work
    tokens_per_s: tuple[float, ...]
    step_ms: float
    sampled_tokens_per_s: tuple[float, ...]
    sampled_step_ms: float
    of_greedy: float
    shortfall: float
    of_base: float | None = None


def measure(engine: Engine, work: Work, turns: int = TURNS) -> Row:
    """Check the tokens that the engine generates for a set of requests, then time whole runs.

    turns: number of timed greedy runs, and of timed sampled runs.

    Raises AssertionError if the engine's tokens are wrong.
    """
    answers = _run(engine, work, 0).answers
    shortfall = plain.check(engine, plain.some(answers))
    greedy, sampled = list[Run](), list[Run]()
    for turn in range(turns):
        greedy.append(_run(engine, work, 1 + 2 * turn))
        sampled.append(_run(engine, replace(work, sampling=SAMPLED), 2 + 2 * turn))
    rates, sampled_rates = (tuple(run.tokens_per_s for run in runs) for runs in (greedy, sampled))
    of_greedy = median(b / a for a, b in zip(rates, sampled_rates, strict=True))
    return Row(
        work, rates, _step_ms(greedy[0]), sampled_rates, _step_ms(sampled[0]), of_greedy, shortfall
    )


def measure_all(engine: Engine, works: Iterable[Work], turns: int = TURNS) -> list[Row]:
    """Measure sets of requests in order; print each row as it is measured.

    turns: number of greedy runs of each set, and of sampled runs.
    """
    return harness.show(_rows(engine, works, turns))


def main() -> None:
    """Measure the chosen rows on one engine."""
    parser = harness.arguments(__doc__)
    harness.add_model_arguments(parser)
    harness.add_rows(parser)
    parser.add_argument("--population", type=int, default=1000, help="adapters of the Zipf row")
    parser.add_argument("--room", type=int, default=ROOM, help="adapters that the GPU holds")
    options = parser.parse_args()
    every = (*WORKS, *OF_MIXTURES, zipf(options.population)) if options.rows else WORKS
    works = harness.chosen(parser, every, options.rows)
    facts = harness.facts(options.commit)
    arguments = harness.adapters_of(works, options.host_adapters) | harness.model_of(options)
    arguments["room"] = min(arguments["room"], options.room)
    with harness.full_engine(**arguments) as engine:
        rows = measure_all(engine, works)
    harness.write(options.json, facts, **harness.about(options), throughput=rows)


def _rows(engine: Engine, works: Iterable[Work], turns: int) -> Iterator[Row]:
    base: dict[tuple[int, int], float] = {}
    for work in works:
        row = measure(engine, work, turns)
        lengths, rate = (work.prompt_tokens, work.output_tokens), row.tokens_per_s[0]
        if not work.adapters:
            base[lengths] = rate
        yield replace(row, of_base=rate / base[lengths] if lengths in base else None)


def _step_ms(run: Run) -> float:
    steps_ms = run.steps_ms()
    return median(steps_ms[len(steps_ms) // 2 :])


def _run(engine: Engine, work: Work, run: int) -> Run:
    if work.cold:
        empty_device(engine._tiers)
    done = generate(engine, work.draw(engine.info.vocab_size, run))
    short = [a.request.request_id for a in done.answers if len(a.tokens) != work.output_tokens]
    assert not short, f"not {work.output_tokens} tokens: {short}"
    return done


if __name__ == "__main__":
    main()
