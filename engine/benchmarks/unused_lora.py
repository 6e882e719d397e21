"""What adapters cost the requests that use none.

python -m engine.benchmarks.unused_lora --json unused_lora.json

The same base requests on two engines over one model: one has 128 adapters on its GPU, the other
has no memory for adapters at all and can serve none. Their runs alternate, so that what changes on
the machine meanwhile changes both.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from engine.benchmarks import plain, results
from engine.benchmarks.offline import Work, generate
from engine.benchmarks.random_engine import random_engine
from lorikeet_engine.engine import Engine

ADAPTERS = 128
PAIRS = 5
WORKS = (Work("base", 256, 128), Work("base", 16, 256))


@dataclass(frozen=True, slots=True)
class Row:
    """Output tokens per second of each run with and without adapters, in pairs.

    share: the median of with / without.
    """

    work: Work
    with_adapters: list[float]
    without: list[float]
    share: float


def measure(with_adapters: Engine, without: Engine, work: Work) -> Row:
    """Check, then time; raises AssertionError where an engine's tokens are wrong."""
    engines = (with_adapters, without)
    for engine in engines:
        answers = generate(engine, work.draw(engine.config.vocab_size, 0)).answers
        plain.check(engine, plain.some(answers))
    rates: tuple[list[float], list[float]] = ([], [])
    for pair in range(PAIRS):
        for which in (0, 1) if pair % 2 else (1, 0):
            engine = engines[which]
            requests = work.draw(engine.config.vocab_size, 1 + pair)
            rates[which].append(generate(engine, requests).tokens_per_s)
    share = median(on / off for on, off in zip(*rates, strict=True))
    return Row(work, *rates, share)


def measure_all(with_adapters: Engine, without: Engine, works: Iterable[Work]) -> list[Row]:
    """Load all adapters, then measure in this order; prints each row as it comes."""
    generate(with_adapters, Work("load", 16, 2, ADAPTERS).draw(with_adapters.config.vocab_size, 0))
    print("base requests   in/out   with adapters    without    share")
    rows = []
    for work in works:
        row = measure(with_adapters, without, work)
        print(
            f"{work.requests:<13}{work.prompt_tokens:>5}/{work.output_tokens:<4}"
            f"{median(row.with_adapters):>15,.0f}{median(row.without):>11,.0f}{row.share:>9.1%}",
            flush=True,
        )
        rows.append(row)
    return rows


def engine_without(folder: Path, other: Engine) -> Engine:
    """An engine over the other's model that has no memory for adapters."""
    return random_engine(folder, load=lambda *_: other._runner.model)


def main() -> None:
    """Measure both works."""
    options = results.arguments(__doc__).parse_args()
    facts = results.facts(options.commit)
    with tempfile.TemporaryDirectory() as folder:
        engine = random_engine(Path(folder), adapters=ADAPTERS, room=ADAPTERS)
        other = engine_without(Path(folder), engine)
        rows = measure_all(engine, other, WORKS)
        engine.close()
        other.close()
    results.write(options.json, facts, unused_lora=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
