"""A fleet under traffic, simulated.

python -m loadtest.simulator goals --json goals.json      what routing must reach, measured
python -m loadtest.simulator run --router lorikeet …      one scenario
python -m loadtest.simulator large                        1,000 replicas for an hour
python -m loadtest.simulator changes                      what follows when replicas come and go
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from loadtest.simulator.baselines import ROUTERS
from loadtest.simulator.changes import columns, rows, timelines
from loadtest.simulator.goals import USUAL, goals, goals_table, scenarios, trials
from loadtest.simulator.oracle import ORACLE
from loadtest.simulator.outcome import Outcome
from loadtest.simulator.scenario import Scenario
from loadtest.simulator.trials import COLUMNS, measure, measure_all, table
from loadtest.workload import DATA

# A tenth of a percent of the adapters is room for 100 on each GPU: 16 GB.
LARGE = Scenario(
    adapters=100_000,
    replicas=1000,
    rate_per_s=1000.0,
    gpu_room=0.001,
    host_room=0.004,
    disk_room=0.02,
    duration_s=3600.0,
)


def main() -> int:
    """Run what the command line says; 1 if a goal is missed."""
    options = _arguments()
    if options.command == "goals":
        return _goals(options.json, options.processes)
    if options.command == "changes":
        return _changes(options.json, options.processes)
    scenario = LARGE if options.command == "large" else _scenario(options)
    began_s = time.perf_counter()
    outcome = measure((scenario, options.router))
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time()
    took = {"took_s": took_s, "cpu_s": cpu_s}
    _write(options.json, {"scenario": options.command, **asdict(outcome), **took})
    print(_outcomes([outcome]))
    print(f"{scenario.rate:,.0f} requests/s; took {took_s:.0f} s, {cpu_s:.0f} of them on the CPU")
    return 0


def _goals(path: Path | None, processes: int) -> int:
    planned = trials()
    found: dict[str, dict[str, Outcome]] = defaultdict(dict)
    measured = measure_all(list(planned.values()), processes)
    for (name, router), outcome in zip(planned, measured, strict=True):
        found[name][router] = outcome
        if len(found[name]) == len(planned) // len(scenarios()):
            print(f"\n{name}\n\n{_outcomes(found[name].values())}", flush=True)
    results = list(goals(found))
    print(f"\n{goals_table(results)}")
    outcomes = [{"where": name, **asdict(one)} for name, of in found.items() for one in of.values()]
    _write(path, {"outcomes": outcomes, "goals": [asdict(goal) for goal in results]})
    return 0 if all(goal.met for goal in results) else 1


def _changes(path: Path | None, processes: int) -> int:
    found = list(timelines(processes))
    print(table([row for course in found for row in rows(course)], columns()))
    _write(path, [asdict(course) for course in found])
    return 0


def _outcomes(outcomes: Iterable[Outcome]) -> str:
    rows = [[column(one) for column in COLUMNS.values()] for one in outcomes]
    return table(rows, list(COLUMNS))


def _write(path: Path | None, result: object) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def _scenario(options: argparse.Namespace) -> Scenario:
    given = {name: getattr(options, name) for name in _options()}
    return Scenario(**given)


def _options() -> dict[str, object]:
    return {field.name: getattr(USUAL, field.name) for field in fields(Scenario)[:-1]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    parts = {name: commands.add_parser(name) for name in ("goals", "run", "large", "changes")}
    for part in parts.values():
        part.add_argument("--json", type=Path, help="where the numbers go")
    for name in ("goals", "changes"):
        parts[name].add_argument("--processes", type=int, default=2)
    for name in ("run", "large"):
        parts[name].add_argument("--router", choices=[*ROUTERS, ORACLE], default="lorikeet")
    kinds: dict[str, Callable[[str], Any]] = {"rate_per_s": float, "trace": _trace}
    for name, default in _options().items():
        kind = kinds.get(name, type(default))
        flag = "--" + name.replace("_", "-")
        parts["run"].add_argument(flag, type=kind, default=default, help=f"default {default}")
    return parser.parse_args()


def _trace(name: str) -> Path:
    """The path of a recorded trace."""
    return DATA / f"azure_llm_2023_{name}.csv"


if __name__ == "__main__":
    sys.exit(main())
