"""Simulator of a fleet under traffic: hit rate, loads, TTFT and balance of a router.

python -m loadtest.simulator run --router lorikeet …      one scenario
python -m loadtest.simulator large                        1,000 replicas for an hour

Prints the outcome as a table with one row; --json writes it to a file.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from loadtest.simulator.baselines import ORACLE, ROUTERS, oracle
from loadtest.simulator.outcome import Outcome, summarize
from loadtest.simulator.scenario import Scenario
from loadtest.workload import DATA
from lorikeet.simulator.fleet import SimulatedFleet
from lorikeet_engine.residency.eviction_score import (
    EvictionPolicy,
    LeastRecentlyUsed,
    LeastUsedForItsSize,
)

# Tiers in the proportions of 10,000 adapters: 79 GB on a GPU, 157 on its host, 470 on its disk.
USUAL = Scenario(host_room=0.10, disk_room=0.30)
# 0.1% of the adapters are 100 on each GPU: 16 GB.
LARGE = Scenario(
    adapters=100_000,
    replicas=1000,
    rate_per_s=1000.0,
    gpu_room=0.001,
    host_room=0.004,
    disk_room=0.02,
    duration_s=3600.0,
)
COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "router": lambda one: one.router,
    "hit rate": lambda one: f"{one.hit_rate:.1%}",
    "cold loads": lambda one: f"{one.cold_loads:,}",
    "loaded": lambda one: f"{one.loaded_gb:,.0f} GB",
    "TTFT p50": lambda one: _ms(one.ttft_p50_s),
    "p99": lambda one: _ms(one.ttft_p99_s),
    "max/mean load": lambda one: _ratio(one.balance),
    "worst minute": lambda one: _ratio(one.balance_worst_minute),
}


def main() -> int:
    """Run the scenario of the command line and print its outcome; return exit status 0."""
    options = _arguments()
    scenario = LARGE if options.command == "large" else _scenario(options)
    began_s = time.perf_counter()
    outcome = measure(scenario, options.router)
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time()
    if options.json is not None:
        timed = {"took_s": took_s, "cpu_s": cpu_s}
        written = {"scenario": options.command, **asdict(outcome), **timed}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    print(table([[column(outcome) for column in COLUMNS.values()]], list(COLUMNS)))
    print(f"{scenario.rate:,.0f} requests/s; took {took_s:.0f} s, {cpu_s:.0f} of them on the CPU")
    return 0


def measure(scenario: Scenario, router: str) -> Outcome:
    """Run a scenario under one router.

    router: ORACLE or a name in ROUTERS. The product's router evicts by the product's own policy,
        the others evict the least recently used adapter.
    """
    if router == ORACLE:
        return oracle(scenario)
    ours = router == "lorikeet"
    policy: EvictionPolicy = LeastUsedForItsSize() if ours else LeastRecentlyUsed()
    fleet = SimulatedFleet(
        scenario.setup(), scenario.requests(), ROUTERS[router](scenario.seed), policy
    )
    fleet.run()
    return summarize(router, fleet)


def table(rows: Iterable[Sequence[str]], head: Sequence[str]) -> str:
    """Format rows under a head as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
    parts = {name: commands.add_parser(name) for name in ("run", "large")}
    for part in parts.values():
        part.add_argument("--json", type=Path, help="JSON file for the outcome")
        part.add_argument(
            "--router", choices=[*ROUTERS, ORACLE], default="lorikeet", help="router to simulate"
        )
    kinds: dict[str, Callable[[str], Any]] = {"rate_per_s": float, "trace": _trace}
    for name, default in _options().items():
        kind = kinds.get(name, type(default))
        flag = "--" + name.replace("_", "-")
        parts["run"].add_argument(flag, type=kind, default=default, help=f"default {default}")
    return parser.parse_args()


def _trace(name: str) -> Path:
    """Return the path of a recorded trace."""
    return DATA / f"azure_llm_2023_{name}.csv"


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{seconds * 1e3:,.0f} ms"


def _ratio(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
