"""Table of all numbers of docs/benchmarks.md that take one engine, from one process.

python -m loadtest.engine.table --json table.json [--weight-dtype fp8] [--rows 'base*']

An engine's start takes longer than most rows: here one start serves throughput, decode and prefill
in turn. Prints each row as it is measured; a failed part is named at the end, and the rows of the
others are kept.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from itertools import chain
from typing import Any

from loadtest.engine import decode, harness, prefill, throughput
from loadtest.engine.offline import Work
from lorikeet_engine.errors import StepFailed

PARTS: dict[str, Any] = {"throughput": throughput, "decode": decode, "prefill": prefill}
"""Modules with WORKS and measure_all, by name."""


def main() -> None:
    """Measure the chosen rows; exit with 1 if a part failed."""
    parser = harness.arguments(__doc__)
    harness.add_model_arguments(parser)
    harness.add_rows(parser)
    parser.add_argument(
        "--turns", type=int, default=throughput.TURNS, help="runs of each row of throughput"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default all"
    )
    options = parser.parse_args()
    works = {name: harness.fitting(_works(name, options), options.rows) for name in options.parts}
    if not any(works.values()):
        parser.error(f"--rows {' '.join(options.rows)}: no part has such a row")
    facts = harness.facts(options.commit) | harness.about(options)
    rows: dict[str, list[Any]] = {}
    adapters = harness.adapters_of(chain.from_iterable(works.values()), options.host_adapters)
    with harness.full_engine(**adapters, **harness.model_of(options)) as engine:
        for name in options.parts:
            try:
                more = {"turns": options.turns} if name == "throughput" else {}
                rows[name] = PARTS[name].measure_all(engine, works[name], **more)
            except Exception:
                traceback.print_exc()
                engine.fail_all(StepFailed("the benchmark of this request failed"))
            harness.write(options.json, facts, **rows)
    failed = [name for name in options.parts if name not in rows]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _works(part: str, options: argparse.Namespace) -> Sequence[Work]:
    works: Sequence[Work] = PARTS[part].WORKS
    if options.rows and part == "throughput":
        return (*works, *throughput.OF_MIXTURES)
    return works


if __name__ == "__main__":
    main()
