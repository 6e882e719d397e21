"""The real service under the simulator's traffic, on paced engines.

python -m loadtest.paced_service                                  all of it
python -m loadtest.paced_service --scenarios "zipf 1.0" --routers lorikeet --seconds 300
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from loadtest.cluster import cluster
from loadtest.paced_service.goals import RealAndSimulated, goals
from loadtest.paced_service.measure import (
    measure_overhead_s,
    measure_real,
    measure_simulated,
    pace_of,
    router_options,
    settings_of,
)
from loadtest.paced_service.scenario import SCENARIOS, WEIGHTS, lasting, slowed
from loadtest.paced_service.service import ROUTERS, service
from loadtest.real_service.adapters import fill_catalog
from loadtest.simulator.goals import HOT, goals_table
from loadtest.simulator.scenario import Scenario
from loadtest.simulator.trials import COLUMNS, table

# What the goals compare: sticky routing where one adapter is hot, the others where none is.
_NOT_COMPARED = {("multiplexing", name) for name in SCENARIOS if name != HOT}
_NOT_COMPARED |= {("power of two", HOT), ("bounded hashing", HOT)}


def main() -> int:
    """Run what the command line asks for; print tables, write JSON; 1 if a goal is missed."""
    options = _arguments()
    wanted = {name: _scenario(name, options) for name in options.scenarios}
    began_s, pairs = time.perf_counter(), list[RealAndSimulated]()
    with tempfile.TemporaryDirectory(prefix="lorikeet-fleet-") as folder:
        for pair in _run(wanted, options.routers, Path(folder)):
            pairs.append(pair)
            print(f"{_table(pairs[-1:])}\n{_remarks(pair)}\n", flush=True)
    results = list(goals(pairs))
    print(f"\n{_table(pairs)}\n\n{goals_table(results)}")
    print(f"\ntook {time.perf_counter() - began_s:.0f} s")
    if options.json:
        runs, found = [asdict(pair) for pair in pairs], [asdict(goal) for goal in results]
        options.json.write_text(json.dumps({"runs": runs, "goals": found}, indent=1) + "\n")
    return 0 if all(goal.met for goal in results) else 1


def _run(
    wanted: dict[str, Scenario], routers: list[str], folder: Path
) -> Iterator[RealAndSimulated]:
    """Run all scenarios of each router on one service."""
    any_scenario = next(iter(wanted.values()))
    settings = settings_of(any_scenario, folder)
    stock = fill_catalog(settings, any_scenario.ranks.tolist(), WEIGHTS)
    with cluster() as url:
        for router in routers:
            compared = {n: s for n, s in wanted.items() if (router, n) not in _NOT_COMPARED}
            if not compared:
                continue
            pace = pace_of(any_scenario, stock, router, folder)
            with service(settings, pace, router, router_options(any_scenario, router)):
                overhead_s = measure_overhead_s(url, stock.key, any_scenario)
                for name, scenario in compared.items():
                    real, remarks = measure_real(url, stock.key, scenario, router, folder)
                    simulated = measure_simulated(scenario, router, overhead_s)
                    yield RealAndSimulated(name, real, simulated, overhead_s, remarks)


def _scenario(name: str, options: argparse.Namespace) -> Scenario:
    usual = replace(SCENARIOS[name], adapters=options.adapters, replicas=options.replicas)
    return lasting(slowed(usual, options.slowdown), options.seconds)


def _table(pairs: Iterable[RealAndSimulated]) -> str:
    """A row for each run and one for its simulation."""
    rows = [
        (pair.scenario, kind, *(column(one) for column in COLUMNS.values()))
        for pair in pairs
        for kind, one in (("real", pair.real), ("simulated", pair.simulated))
    ]
    return table(rows, ("scenario", "", *COLUMNS))


def _remarks(pair: RealAndSimulated) -> str:
    return (
        f"steps took {pair.remarks.slip:.1%} longer than paced; requests were sent at most "
        f"{pair.remarks.late_s * 1e3:.0f} ms late; one that is alone is "
        f"{pair.overhead_s * 1e3:.0f} ms on its way; {pair.remarks.prefetches} adapters were "
        "prefetched"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--seconds", type=float, default=40.0, help="of traffic; default 40")
    parser.add_argument("--adapters", type=int, default=1000, help="default 1000")
    parser.add_argument("--replicas", type=int, default=4, help="default 4")
    parser.add_argument("--slowdown", type=float, default=1.0, help="of all that is paced")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
