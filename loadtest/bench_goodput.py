"""Goodput: most requests per second that a GPU serves within latency goals, with 1,000 adapters.

python -m loadtest.bench_goodput --json goodput.json --folder /tmp/real

An open loop over HTTP: requests arrive as a Poisson process, whether or not earlier ones are
answered, and TTFT counts from the due time. Lengths follow the Azure conversation trace, cut to a
context of 2,048 tokens. Adapters are chosen by Zipf's law with s = 1.0 in a fixed popularity order;
ranks 8, 16, 32 and 64 are dealt round, on the linears of --linears. Before the first rate every
adapter is requested once, the most popular last.

Goals: p99 of TTFT at most 1 s, p99 of the gaps between deltas of an answer at most 50 ms, and every
answer complete. A delta is data that arrives at once, usually one token; several tokens that arrive
together end one gap. The rate grows by half until it misses a goal, then bisects.

Prints a line for each rate and the best rate, then stages of requests (`GET /v1/requests/ID`) at
the best rate and the next higher rate; writes all as JSON. Exits with 1 if no rate meets the goals.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from loadtest.client import Server, run_sessions
from loadtest.engine.harness import arguments, facts, write
from loadtest.real_service.adapter_traffic import (
    Traffic,
    add_traffic_arguments,
    settings_of_traffic,
    warm_service,
)
from loadtest.real_service.service import CpuUsage
from loadtest.report import (
    by_residency,
    gaps_s,
    lateness_s,
    quantiles_ms,
    split,
    stage_lines,
    stages_ms,
    ttfts_s,
)
from loadtest.streamed_answer import StreamedAnswer

Row = dict[str, Any]

TTFT_GOAL_MS, ITL_GOAL_MS = 1000.0, 50.0
_OWN = "goodput"  # folder of the catalog and cache, recreated for each run
_STEP = 1.5
_HEADING = (
    "  rate  requests   TTFT p50      p99   ITL p50      p99    on GPU   running   tokens/s  "
    "late p99"
)


def measure(
    server: Server, traffic: Traffic, rate_per_s: float, seed: int, given: argparse.Namespace
) -> Row:
    """Measure the service at one rate of requests.

    seed: seed of the requests.
    given: options of the command line.
    """
    sessions = traffic.sessions(rate_per_s, given.seconds, seed)
    with CpuUsage() as cores:
        answers = run_sessions(server, sessions, given.clients)
    whole, failures = split(answers)
    ttft_ms, itl_ms = quantiles_ms(ttfts_s(whole)), quantiles_ms(gaps_s(whole))
    last_s = max(answer.ended_s for answer in answers)
    good = not failures and ttft_ms["p99"] <= TTFT_GOAL_MS and itl_ms["p99"] <= ITL_GOAL_MS
    return {
        "rate_per_s": rate_per_s,
        "good": good,
        "requests": len(answers),
        "failures": dict(failures.most_common(3)),
        "ttft_ms": ttft_ms,
        "itl_ms": itl_ms,
        "late_ms": quantiles_ms(lateness_s(answers)),
        "found": dict(Counter(answer.residency for answer in whole)),
        "ttft_by_tier_ms": _by_tier(whole),
        "tokens_per_s": sum(answer.request.output_tokens for answer in whole) / last_s,
        "prompt_tokens_per_s": sum(answer.request.prompt_tokens for answer in whole) / last_s,
        "running": sum(answer.ended_s - answer.due_s for answer in whole) / given.seconds,
        "stages_ms": stages_ms(server, whole),
        "cores": cores.used(last_s),
    }


def search(measured: Callable[[float], Row], first_rate: float, points: int) -> list[Row]:
    """Measure the service at several rates of requests; return a row for each rate.

    The rate grows until a goal is missed; then the interval between rates that met and missed the
    goals is bisected.

    measured: measures the service at the rate that it is given.
    points: number of rates.
    """
    rows: list[Row] = []
    low, high, rate = 0.0, math.inf, first_rate
    while len(rows) < points:
        rows.append(measured(rate))
        low, high = (rate, high) if rows[-1]["good"] else (low, rate)
        rate = _STEP * rate if high == math.inf else round((low + high) / 2, 2)
    return rows


def main() -> int:
    """Measure and print; return 1 if no rate met the goals."""
    given = _arguments()
    noted, variables = facts(given.commit), _variables(given)
    with warm_service(given, variables) as (server, traffic):
        seeds = count(1)

        def measured(rate_per_s: float) -> Row:
            row = measure(server, traffic, rate_per_s, next(seeds), given)
            print(_line(row), flush=True)
            return row

        print(_HEADING, flush=True)
        rows = search(measured, given.first_rate, given.points)
    best = max((row["rate_per_s"] for row in rows if row["good"]), default=0.0)
    print(f"\ngoodput: {best:g} requests a second")
    _print_stages(rows, best)
    write(given.json, noted, goodput=rows, best_per_s=best, settings=variables)
    return 0 if best else 1


def _by_tier(answers: Sequence[StreamedAnswer]) -> dict[str, Any]:
    """Return TTFT quantiles by the tier in which the adapter was found."""
    tiers = sorted(by_residency(answers).items())
    return {tier: quantiles_ms(ttfts_s(found)) for tier, found in tiers if found}


def _line(row: Mapping[str, Any]) -> str:
    ttft, itl, found = row["ttft_ms"], row["itl_ms"], row["found"]
    hits = found.get("gpu", 0) / max(1, sum(found.values()))
    failed = sum(row["failures"].values())
    return (
        f"{row['rate_per_s']:>6g}{row['requests']:>10}{ttft['p50']:>11.1f}{ttft['p99']:>9.1f}"
        f"{itl['p50']:>10.1f}{itl['p99']:>9.1f}{hits:>10.1%}{row['running']:>10.1f}"
        f"{row['tokens_per_s']:>11,.0f}{row['late_ms']['p99']:>10.1f}"
        f"{'' if row['good'] else '  too much'}{f'  {failed} failed' if failed else ''}"
    )


def _print_stages(rows: Sequence[Mapping[str, Any]], best_per_s: float) -> None:
    """Print stages, busy processes and TTFT by tier, for the best rate and the next higher rate."""
    above = min((row["rate_per_s"] for row in rows if row["rate_per_s"] > best_per_s), default=0.0)
    for row in rows:
        if row["rate_per_s"] not in (best_per_s, above):
            continue
        print(f"\nat {row['rate_per_s']:g} a second", *stage_lines(row["stages_ms"]), sep="\n")
        busy = (f"{part} {used:.1f}" for part, used in row["cores"].items() if used >= 0.05)
        print("  cores: " + ", ".join(busy))
        for tier, ms in row["ttft_by_tier_ms"].items():
            print(f"  TTFT, adapter on {tier}: p50 {ms['p50']:.0f}, p99 {ms['p99']:.0f}")


def _variables(given: argparse.Namespace) -> dict[str, str]:
    """Return the LORIKEET_ variables of the service.

    given: options of the command line.
    """
    return settings_of_traffic(
        given,
        _OWN,
        max_batch_tokens=given.batch_tokens,
        max_running=min(256, given.batch_tokens),
        inter_token_goal_ms=given.goal_ms,
    )


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    add_traffic_arguments(parser, adapters=1000, seconds=30)
    add = parser.add_argument
    add("--first-rate", type=float, default=8, help="requests per second; default 8")
    add("--points", type=int, default=6, help="number of rates; default 6")
    add("--batch-tokens", type=int, default=2048, help="most tokens of a step; default 2048")
    add("--goal-ms", default="40", help="the service's inter-token goal; default 40")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
