"""Every number of docs/benchmarks.md that takes one engine, in one process and one JSON file.

python -m engine.benchmarks.table --json table.json

An engine's start takes longer than most rows: here one start serves throughput, decode and prefill
in turn. A part that fails is named at the end; the others' numbers are kept.
"""

import sys
import traceback
from typing import Any

from engine.benchmarks import decode, harness, prefill, throughput
from lorikeet_engine.errors import StepFailed

PARTS: dict[str, Any] = {"throughput": throughput, "decode": decode, "prefill": prefill}
"""Each a module with WORKS and measure_all."""


def main() -> None:
    """Measure the parts that are asked for; exits with 1 if one failed."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    rows: dict[str, list[Any]] = {}
    with harness.full_engine(adapters=throughput.ROOM, room=throughput.ROOM) as engine:
        for name in options.parts:
            try:
                rows[name] = PARTS[name].measure_all(engine, PARTS[name].WORKS)
            except Exception:
                traceback.print_exc()
                engine.fail_all(StepFailed("the benchmark of this request failed"))
            harness.write(options.json, facts, **rows)
    failed = [name for name in options.parts if name not in rows]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
