"""The real service under the simulator's traffic, on paced engines.

python -m loadtest.fleet                                  all of it
python -m loadtest.fleet --scenarios "zipf 1.0" --routers lorikeet --seconds 300
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.fleet.adapters import fill_catalog
from loadtest.fleet.run import measure_real, pace_of, settings_of
from loadtest.fleet.scenario import SCENARIOS, USUAL, lasting
from loadtest.fleet.service import ROUTERS, cluster, service
from loadtest.simulator.goals import HOT
from loadtest.simulator.trial import COLUMNS, measure, table
from lorikeet.simulator.outcome import Outcome

# What the goals compare: sticky routing where one adapter is hot, the others where none is.
_NOT_COMPARED = {("multiplexing", name) for name in SCENARIOS if name != HOT}
_NOT_COMPARED |= {("power of two", HOT), ("bounded hashing", HOT)}


@dataclass(frozen=True, slots=True)
class Pair:
    """One run and its simulation."""

    scenario: str
    real: Outcome
    simulated: Outcome


def main() -> int:
    """Run what the command line asks for; print a table and write JSON."""
    options = _arguments()
    began_s, pairs = time.perf_counter(), list[Pair]()
    with tempfile.TemporaryDirectory(prefix="lorikeet-fleet-") as name, cluster() as url:
        folder = Path(name)
        settings = settings_of(USUAL, folder)
        stock = fill_catalog(settings, USUAL.ranks.tolist())
        for router in options.routers:
            wanted = [s for s in options.scenarios if (router, s) not in _NOT_COMPARED]
            if not wanted:
                continue
            pace = pace_of(USUAL, stock, router, folder)
            with service(settings, pace, router, USUAL.costs):
                for chosen in wanted:
                    scenario = lasting(SCENARIOS[chosen], options.seconds)
                    real = measure_real(url, stock.key, scenario, router, pace.loads_file)
                    pairs.append(Pair(chosen, real, measure((scenario, router))))
                    print(_table(pairs[-1:]), flush=True)
    took_s = time.perf_counter() - began_s
    print(f"\n{_table(pairs)}\n\ntook {took_s:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(pair) for pair in pairs], indent=1) + "\n")
    return 0


def _table(pairs: Iterable[Pair]) -> str:
    """A row for each run and one for its simulation."""
    rows = [
        (pair.scenario, kind, *(column(one) for column in COLUMNS.values()))
        for pair in pairs
        for kind, one in (("real", pair.real), ("simulated", pair.simulated))
    ]
    return table(rows, ("scenario", "", *COLUMNS))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--seconds", type=float, default=45.0, help="of traffic, each; default 45")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
