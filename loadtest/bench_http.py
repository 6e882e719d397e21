"""Token rate of engines through HTTP, as a share of their rate without a service.

python -m loadtest.bench_http --json http.json --folder /tmp/real

Adapters of one rank on all linears are dealt round over the requests, and all are on every GPU.
Each replica gets --streams streams of --rounds requests one after another, sent by several client
processes. Without a service the same work goes through the product's engine, one process for each
GPU, all at the same time. Every answer must be complete and have the requested number of tokens; an
incomplete answer ends the measurement.

The rate is all tokens of a run over the time until the end of the last answer. Prints a line for
each proxy, number of gateways and work, with latencies and stages, and writes them as JSON; exits
with 1 if a share is below 90%.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from loadtest.client import Server, run_sessions
from loadtest.cluster import PROXIES
from loadtest.engine.harness import arguments, facts, write
from loadtest.real_service.adapters import TENANT, FilledCatalog, fill_catalog, image_bytes
from loadtest.real_service.offline import Job, ServiceWork, run_beside
from loadtest.real_service.random_models import SHAPES, add_model_arguments, settings_of_model
from loadtest.real_service.service import CpuUsage, RunningService, service
from loadtest.report import all_whole, gaps_s, quantiles_ms, stage_lines, stages_ms, ttfts_s
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.store.object_store import open_store
from lorikeet.settings import Settings
from lorikeet_engine.adapter import Residency

GOAL = 0.9
_OWN = "http"  # folder of the catalog and cache, recreated for each run
_UNCOUNTED = 1  # rounds that warm up
# A replica can run one more sequence for every four streams: no router keeps replicas exactly even,
# and on a full replica a request waits for the end of a whole answer.
_STREAMS_PER_SPARE = 4


def main() -> int:
    """Measure and print; return 1 if the goal is missed."""
    given = _arguments()
    noted, rows = facts(given.commit), list[dict[str, Any]]()
    variables = _variables(given)
    stock = _stock(Settings.from_env(variables), given)
    works = [
        ServiceWork.parse(
            lengths, streams=given.streams, rounds=given.rounds, adapters=given.adapters
        )
        for lengths in given.work
    ]
    alone = run_beside(Job(stock.refs, tuple(works)), variables, given.replicas, given.folder)
    for work in works:
        print(f"offline {work.label}: {_sum(alone, work):,.0f} tokens/s", flush=True)
    for proxy, gateways in product(given.proxies, given.gateways):
        settings = variables | {"LORIKEET_GATEWAYS": str(gateways)}
        with service(settings, proxy) as running:
            running.wait_until_resident(stock.admin_key, len(stock.refs), given.replicas)
            for work in works:
                row = {"proxy": proxy, "gateways": gateways}
                row |= measure(running, stock, work, given)
                rows.append(row | {"share": row["tokens_per_s"] / _sum(alone, work)})
                print(_line(rows[-1]), *stage_lines(rows[-1]["stages_ms"]), sep="\n", flush=True)
                write(given.json, noted, http=rows, offline=alone)
    return 0 if all(row["share"] >= GOAL for row in rows) else 1


def measure(
    running: RunningService, stock: FilledCatalog, work: ServiceWork, given: argparse.Namespace
) -> dict[str, Any]:
    """Measure one set of requests through HTTP, after an uncounted round.

    Raises RuntimeError for an incomplete answer.

    stock: adapters and keys of the service.
    given: options of the command line.
    """
    server = Server(running.url, stock.key, SHAPES[given.shape]["vocab_size"])
    every = replace(work, streams=work.streams * given.replicas)
    all_whole(run_sessions(server, replace(every, rounds=_UNCOUNTED).sessions(1), given.clients))
    with CpuUsage() as cores:
        answers = all_whole(run_sessions(server, every.sessions(2), given.clients))
    last_s = max(answer.ended_s for answer in answers)
    return {
        "work": work.label,
        "requests": len(answers),
        "tokens_per_s": sum(answer.request.output_tokens for answer in answers) / last_s,
        "deltas_per_s": sum(len(answer.deltas_s) for answer in answers) / last_s,
        "first_ms": quantiles_ms(ttfts_s(answers)),
        "between_ms": quantiles_ms(gaps_s(answers)),
        "by_replica": sorted(Counter(answer.replica for answer in answers).values()),
        "found": dict(Counter(answer.residency for answer in answers)),
        "streams": sum(answer.ended_s - answer.deltas_s[0] for answer in answers) / last_s,
        "stages_ms": stages_ms(server, answers),
        "cores": cores.used(last_s),
    }


def _sum(alone: Sequence[Mapping[str, Any]], work: ServiceWork) -> float:
    """Return the tokens per second of all engines together without a service, for one work.

    alone: rows of the engines without a service, for this work and others.
    """
    return sum(row["tokens_per_s"] for row in alone if row["label"] == work.label)


def _stock(settings: Settings, given: argparse.Namespace) -> FilledCatalog:
    """Write the model's folder and the catalog, and pin all adapters to every GPU."""
    stock = fill_catalog(settings, [given.rank] * given.adapters)
    catalog = AdapterCatalog(open_store(settings.catalog))
    catalog.pin(TENANT, None, tier=Residency.GPU, actor=TENANT)
    return stock


def _variables(given: argparse.Namespace) -> dict[str, str]:
    """Return the service's settings; the sizes of a step equal those of the offline benchmarks."""
    adapter = image_bytes(given.shape, given.rank, given.device)
    return settings_of_model(
        given,
        _OWN,
        replicas=given.replicas,
        max_context=2048,
        max_batch_tokens=given.batch_tokens,
        max_running=max(2, given.streams + given.streams // _STREAMS_PER_SPARE),
        adapter_gpu_memory=(given.adapters + 2) * adapter,
        adapter_host_memory=16 * adapter,
        adapter_disk="200GiB",
    )


def _line(row: Mapping[str, Any]) -> str:
    first, between = row["first_ms"], row["between_ms"]
    cores = ", ".join(f"{part} {used:.1f}" for part, used in row["cores"].items() if used >= 0.1)
    return (
        f"{row['proxy']}, {row['gateways']} gateways, {row['work']}: "
        f"{row['tokens_per_s']:,.0f} tokens/s, {row['share']:.1%} of offline, in "
        f"{row['deltas_per_s']:,.0f} deltas/s; first token p50 {first['p50']:,.0f}, "
        f"p99 {first['p99']:,.0f} ms; between deltas p50 {between['p50']}, p99 {between['p99']} ms;"
        f" {row['streams']:.0f} streams at a time; requests of each replica {row['by_replica']}; "
        f"found {row['found']}; cores: {cores}"
    )


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add("--replicas", type=int, default=2, help="replicas of one GPU; default 2")
    add(
        "--gateways",
        type=int,
        nargs="+",
        default=[8],
        help="numbers of gateways, one service each; default 8",
    )
    add("--clients", type=int, default=8, help="client processes; default 8")
    add("--proxies", nargs="+", choices=PROXIES, default=["HAProxy"])
    add("--work", nargs="+", default=["256/128", "16/256"], help="prompt tokens/answer tokens")
    add("--adapters", type=int, default=128, help="number of adapters; default 128")
    add("--rank", type=int, default=16, help="rank of every adapter; default 16")
    add("--streams", type=int, default=256, help="streams of each replica; default 256")
    add("--rounds", type=int, default=3, help="requests of each stream; default 3")
    add("--batch-tokens", type=int, default=8192, help="most tokens of a step; default 8192")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
