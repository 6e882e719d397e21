"""Every number of docs/benchmarks.md that takes one engine, in one process and one JSON file.

python -m engine.benchmarks.table --json table.json

An engine's start takes longer than most rows: here one start serves throughput, decode and prefill
in turn. A part that fails is named at the end; the others' numbers are kept.
"""

import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.benchmarks import decode, prefill, results, throughput
from engine.benchmarks.random_engine import random_engine
from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import StepFailed


def _throughput(engine: Engine) -> Sequence[Any]:
    return throughput.measure_all(engine, throughput.WORKS)


def _decode(engine: Engine) -> Sequence[Any]:
    return decode.measure_all(engine, decode.WORKS)


def _prefill(engine: Engine) -> Sequence[Any]:
    return [prefill.measure(engine._runner.model, *prefill.SIZES)]


PARTS: dict[str, Callable[[Engine], Sequence[Any]]] = {
    "throughput": _throughput,
    "decode": _decode,
    "prefill": _prefill,
}


def main() -> None:
    """Measure the parts that are asked for; exits with 1 if one failed."""
    parser = results.arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    facts = results.facts(options.commit)
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = random_engine(Path(folder), adapters=throughput.ROOM, room=throughput.ROOM)
        for part in options.parts:
            try:
                rows[part] = [asdict(row) for row in PARTS[part](engine)]
            except Exception:
                traceback.print_exc()
                engine.fail_all(StepFailed("the benchmark of this request failed"))
            results.write(options.json, facts, **rows)
        engine.close()
    failed = [part for part in options.parts if part not in rows]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
