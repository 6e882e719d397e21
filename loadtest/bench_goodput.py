"""Goodput: the most requests a second that a GPU serves well, over HTTP, with 1,000 adapters.

python -m loadtest.bench_goodput --json goodput.json --folder /tmp/real

An open loop: requests arrive as a Poisson process, whether or not earlier ones are answered, and
TTFT runs from when one was due. Lengths are those of the Azure conversation trace, cut to a
context of 2,048 tokens; adapters fall by Zipf's law, s = 1.0, who is popular stays so; ranks 8, 16,
32 and 64 are dealt round, on the linears that --linears says. Before the first rate every adapter
is asked for once, the most popular last.

Served well: p99 of TTFT at most 1 s, p99 of the gaps between two deltas of an answer at most 50 ms,
and every answer whole. A delta is what arrives at once, as a rule one token; several that arrive
together end one gap. The rate grows by a half until it is too much, then bisects.

Where time goes is asked of the service, `GET /v1/requests/ID`, for the slowest and for some others.
"""

import argparse
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from engine.benchmarks.harness import arguments, facts, write
from loadtest.client import Server, Session, run_sessions
from loadtest.real_service.adapters import fill_catalog, model_name
from loadtest.real_service.random_models import (
    LINEARS,
    SHAPES,
    add_model_arguments,
    settings_of_model,
)
from loadtest.real_service.service import PROXIES, CpuUsage, service
from loadtest.real_service.stage_times import stage_lines, stages_ms
from loadtest.report import (
    all_whole,
    by_residency,
    gaps_s,
    lateness_s,
    quantiles_ms,
    split,
    ttfts_s,
)
from loadtest.streamed_answer import LoadRequest, StreamedAnswer
from lorikeet.settings import Settings
from lorikeet_engine.traffic import (
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
_OWN = "goodput"  # what is made anew each time
_STEP = 1.5
_WARM_STREAMS = 64
_HEADING = (
    "  rate  requests   TTFT p50      p99   ITL p50      p99    on GPU   running   tokens/s  "
    "late p99"
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Who asks for what. order: adapters, the most popular first. temperature: of each answer."""

    order: Ints
    context: int
    temperature: float = 0.0

    def sessions(self, rate_per_s: float, seconds: float, seed: int) -> list[Session]:
        """Requests that arrive at this rate; other ones for each seed."""
        rng = np.random.default_rng(seed)
        times_s = poisson(rate_per_s).times(rng, seconds)
        inputs, outputs = cut_to_context(*AZURE_CONV.draw(rng, len(times_s)), self.context)
        ranks = Zipf(1.0).draw(rng, len(self.order), len(times_s))
        seeds = rng.integers(0, 2**62, len(times_s)).tolist()
        requests = [
            LoadRequest(
                model_name(int(self.order[rank])), int(prompt), int(answer), each, self.temperature
            )
            for rank, prompt, answer, each in zip(ranks, inputs, outputs, seeds, strict=True)
        ]
        return [
            Session(float(at_s), (request,))
            for at_s, request in zip(times_s, requests, strict=True)
        ]

    def warm_up(self) -> list[Session]:
        """Every adapter once, the most popular ones last."""
        requests = [LoadRequest(model_name(int(a)), 8, 2, int(a)) for a in reversed(self.order)]
        return [Session(0.0, tuple(requests[at::_WARM_STREAMS])) for at in range(_WARM_STREAMS)]


def measure(
    server: Server, traffic: Traffic, rate_per_s: float, seed: int, given: argparse.Namespace
) -> Row:
    """Measure one rate."""
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
    """Measure N rates: growing until one is too much, then between the best and the least bad."""
    rows: list[Row] = []
    low, high, rate = 0.0, math.inf, first_rate
    while len(rows) < points:
        rows.append(measured(rate))
        low, high = (rate, high) if rows[-1]["good"] else (low, rate)
        rate = _STEP * rate if high == math.inf else round((low + high) / 2, 2)
    return rows


def main() -> int:
    """Measure and print; 1 if no rate was good or a client was late."""
    given = _arguments()
    shutil.rmtree(given.folder / _OWN, ignore_errors=True)
    noted, variables = facts(given.commit), _variables(given)
    ranks = deal_ranks(given.adapters, given.ranks).tolist()
    stock = fill_catalog(Settings.from_env(variables), ranks, given.linears)
    order = np.random.default_rng(0).permutation(given.adapters)
    traffic = Traffic(order, given.context, given.temperature)
    with service(variables, given.proxy) as running:
        server = Server(running.url, stock.key, SHAPES[given.shape]["vocab_size"])
        all_whole(run_sessions(server, traffic.warm_up(), given.clients))
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
    """TTFT by where the adapter was found."""
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
    """Print a request's stages and the busy processes, at the best rate and the one above it."""
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
    """The service's settings."""
    model = settings_of_model(given.folder, given.shape, given.device, _OWN)
    return model | {
        "LORIKEET_REPLICAS": "1",
        "LORIKEET_GATEWAYS": str(given.gateways),
        "LORIKEET_MAX_CONTEXT": str(given.context),
        "LORIKEET_MAX_BATCH_TOKENS": str(given.batch_tokens),
        "LORIKEET_MAX_RUNNING": str(min(256, given.batch_tokens)),
        "LORIKEET_KV_CACHE_MEMORY": given.kv,
        "LORIKEET_ADAPTER_GPU_MEMORY": given.gpu,
        "LORIKEET_ADAPTER_HOST_MEMORY": given.host,
        "LORIKEET_ADAPTER_DISK": given.disk,
        "LORIKEET_INTER_TOKEN_GOAL_MS": given.goal_ms,
    }


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add("--adapters", type=int, default=1000, help="default 1000")
    add("--ranks", type=int, nargs="+", default=list(RANKS), help="dealt round")
    add("--linears", nargs="+", choices=LINEARS, default=list(LINEARS[:4]), metavar="LINEAR")
    add("--context", type=int, default=2048, help="most tokens of prompt and answer; 2048")
    add("--temperature", type=float, default=0.0, help="at which answers are sampled; 0: greedy")
    add("--seconds", type=float, default=30, help="of arrivals at each rate; default 30")
    add("--first-rate", type=float, default=8, help="requests a second; default 8")
    add("--points", type=int, default=6, help="rates to try; default 6")
    add("--gateways", type=int, default=4, help="default 4")
    add("--clients", type=int, default=4, help="processes that ask; default 4")
    add("--proxy", choices=PROXIES, default="HAProxy")
    add("--batch-tokens", type=int, default=2048, help="of one step; default 2048")
    add("--goal-ms", default="40", help="the service's inter-token goal; default 40")
    add("--kv", default="40GiB", help="KV cache; default 40GiB")
    add("--gpu", default="12GiB", help="memory for adapters on the GPU; default 12GiB")
    add("--host", default="24GiB", help="and on the host; default 24GiB")
    add("--disk", default="48GiB", help="and on the disk; default 48GiB")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
