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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from loadtest.client import Server, Session, run_sessions
from loadtest.cluster import PROXIES
from loadtest.engine.harness import arguments, facts, write
from loadtest.real_service.adapters import AdapterWeights, fill_catalog, model_name
from loadtest.real_service.random_models import (
    LINEARS,
    SHAPES,
    add_model_arguments,
    settings_of_model,
)
from loadtest.real_service.service import CpuUsage, service
from loadtest.report import (
    all_whole,
    by_residency,
    gaps_s,
    lateness_s,
    quantiles_ms,
    split,
    stage_lines,
    stages_ms,
    ttfts_s,
)
from loadtest.streamed_answer import LoadRequest, StreamedAnswer
from lorikeet.settings import Settings
from lorikeet.simulator.workload_models import (
    AZURE_CONV,
    RANKS,
    Ints,
    Zipf,
    cut_to_context,
    deal_ranks,
    poisson,
)

Row = dict[str, Any]

TTFT_GOAL_MS, ITL_GOAL_MS = 1000.0, 50.0
_OWN = "goodput"  # folder of the catalog and cache, recreated for each run
_STEP = 1.5
_WARM_STREAMS = 64
_HEADING = (
    "  rate  requests   TTFT p50      p99   ITL p50      p99    on GPU   running   tokens/s  "
    "late p99"
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Distribution of requests over adapters and lengths.

    order: adapters, the most popular first.
    context: maximum number of tokens of a prompt plus its answer.
    temperature: sampling temperature of each answer.
    """

    order: Ints
    context: int
    temperature: float = 0.0

    def sessions(self, rate_per_s: float, seconds: float, seed: int) -> list[Session]:
        """Draw requests that arrive at a rate; each seed gives different requests.

        seconds: length of the run.
        """
        rng = np.random.default_rng(seed)
        times_s = poisson(rate_per_s).times(rng, seconds).tolist()
        inputs, outputs = cut_to_context(*AZURE_CONV.draw(rng, len(times_s)), self.context)
        ranks = Zipf(1.0).draw(rng, len(self.order), len(times_s))
        seeds = rng.integers(0, 2**62, len(times_s)).tolist()
        requests = [
            LoadRequest(
                model_name(int(self.order[rank])), int(prompt), int(answer), each, self.temperature
            )
            for rank, prompt, answer, each in zip(ranks, inputs, outputs, seeds, strict=True)
        ]
        return [Session(at_s, (request,)) for at_s, request in zip(times_s, requests, strict=True)]

    def warm_up(self) -> list[Session]:
        """Return one request for each adapter, the most popular last."""
        requests = [LoadRequest(model_name(int(a)), 8, 2, int(a)) for a in reversed(self.order)]
        return [Session(0.0, tuple(requests[at::_WARM_STREAMS])) for at in range(_WARM_STREAMS)]


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


@contextmanager
def warm_service(
    given: argparse.Namespace, variables: Mapping[str, str]
) -> Iterator[tuple[Server, Traffic]]:
    """Run a service with these settings, after one request for every adapter."""
    ranks = deal_ranks(given.adapters, given.ranks).tolist()
    stock = fill_catalog(Settings.from_env(variables), ranks, AdapterWeights(given.linears))
    order = np.random.default_rng(0).permutation(given.adapters)
    traffic = Traffic(order, given.context, given.temperature)
    with service(variables, given.proxy) as running:
        server = Server(running.url, stock.key, SHAPES[given.shape]["vocab_size"])
        all_whole(run_sessions(server, traffic.warm_up(), given.clients))
        yield server, traffic


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
    return settings_of_model(
        given,
        _OWN,
        replicas=1,
        gateways=given.gateways,
        max_context=given.context,
        adapter_gpu_memory=given.gpu,
        adapter_host_memory=given.host,
        adapter_disk=given.disk,
        max_batch_tokens=given.batch_tokens,
        max_running=min(256, given.batch_tokens),
        inter_token_goal_ms=given.goal_ms,
    )


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    add_model_arguments(parser, kv="40GiB")
    add = parser.add_argument
    add("--adapters", type=int, default=1000, help="number of adapters; default 1000")
    add(
        "--ranks",
        type=int,
        nargs="+",
        default=list(RANKS),
        help="ranks, dealt round over the adapters",
    )
    add("--linears", nargs="+", choices=LINEARS, default=list(LINEARS[:4]), metavar="LINEAR")
    add(
        "--context",
        type=int,
        default=2048,
        help="most tokens of a prompt and its answer; default 2048",
    )
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy")
    add("--seconds", type=float, default=30, help="seconds of arrivals; default 30")
    add("--gateways", type=int, default=4, help="number of gateways; default 4")
    add("--clients", type=int, default=4, help="client processes; default 4")
    add("--proxy", choices=PROXIES, default="HAProxy")
    add("--gpu", default="12GiB", help="memory for adapters on the GPU; default 12GiB")
    add("--host", default="24GiB", help="memory for adapters on the host; default 24GiB")
    add("--disk", default="48GiB", help="space for adapters on the disk; default 48GiB")
    add("--first-rate", type=float, default=8, help="requests per second; default 8")
    add("--points", type=int, default=6, help="number of rates; default 6")
    add("--batch-tokens", type=int, default=2048, help="most tokens of a step; default 2048")
    add("--goal-ms", default="40", help="the service's inter-token goal; default 40")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
