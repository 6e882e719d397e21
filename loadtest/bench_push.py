"""Push latency: time from the first byte of a pushed adapter to its first token on all replicas.

python -m loadtest.bench_push --json push.json --folder /tmp/real

Versions of one adapter, of one rank on all linears, are pushed one after another by a client that
holds each version in memory and requests the new version from each replica as soon as the push is
answered. Meanwhile --streams streams per replica run on other adapters. In every second period
nothing is pushed, and the requests are for the last pushed version: both kinds of period have the
same requests, so their difference is the effect of pushes on the streams.

The router is the product's, except that copies of an adapter cost nothing; requests for the pushed
adapter go to each replica in turn.

A gateway and a replica on one machine share a pushed file. With --far the file is sent in parts, as
to another machine.

Versions differ in alpha, which is in the blob's header, so each is a blob of its own, checked, sent
and packed as any other. Stages are those of the gateway (`GET /v1/requests/ID`), within the
client's times.

Prints the stages of a push, and gaps of the streams with and without pushes; writes them as JSON.
Exits with 1 if a goal is missed.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from ray.serve.deployment import Application

from loadtest.client import Server, Session, run_sessions
from loadtest.cluster import PROXIES
from loadtest.engine.harness import arguments, facts, show, write
from loadtest.real_service.adapters import (
    TENANT,
    fill_catalog,
    image_bytes,
    model_name,
    save_adapter,
)
from loadtest.real_service.pushing import (
    FIRST_ALPHA,
    NAME,
    FarReplica,
    NewVersions,
    Pusher,
    PushTimes,
)
from loadtest.real_service.random_models import SHAPES, add_model_arguments, settings_of_model
from loadtest.real_service.service import service
from loadtest.report import all_whole, gaps_s
from loadtest.streamed_answer import LoadRequest, StreamedAnswer
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.object_store import open_store
from lorikeet.serving.deployments import EngineReplica, controller, engine, gateway
from lorikeet.settings import Settings
from lorikeet_engine.adapter_format import BaseShape, write_blob

P50_GOAL_S, P99_GOAL_S, GAP_GOAL = 0.6, 1.2, 1.03
_OWN = "push"  # folder of the catalog and cache, recreated for each run
_STREAMS_BEGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Statistics of one field of PushTimes over all pushes, in seconds."""

    stage: str
    p50: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class StreamGaps:
    """Statistics of the gaps between deltas of the running streams, in milliseconds."""

    pushes: bool
    gaps: int
    p50: float
    p99: float
    most: float


def spreading_app(replica: type[EngineReplica]) -> Application:
    """Return serve_app's application with a router that spreads requests for the pushed adapter.

    replica: class of the engine's replicas.
    """
    settings, engines = Settings.from_env(), dict[str, Application]()
    for name in settings.base_models:
        deployment: Any = engine(settings, name)._bound_deployment.options(
            func_or_class=replica,
            request_router_config={
                "request_router_class": "loadtest.real_service.seeded_router.SeedsChooseReplicas",
                "request_router_kwargs": {"name": NAME, "copy_s": 0.0},
                "request_routing_stats_period_s": 1,
            },
        )
        engines[name] = deployment.bind(name, settings)
    return gateway(settings, engines, controller(settings, engines))


def main() -> int:
    """Measure and print; return 1 if a goal is missed."""
    given = _arguments()
    noted, variables = facts(given.commit), _variables(given)
    settings = Settings.from_env(variables)
    stock = fill_catalog(settings, [given.rank] * given.adapters)
    catalog = AdapterCatalog(open_store(settings.catalog))
    _, publish_key = catalog.create_key(TENANT, {Scope.PUBLISH}, adapters=(NAME,), actor=TENANT)
    version, replica = _version(given), FarReplica if given.far else EngineReplica
    with service(variables, given.proxy, partial(spreading_app, replica)) as running:
        server = Server(running.url, stock.key, SHAPES[given.shape]["vocab_size"])
        pusher = Pusher(server, publish_key, version, given.shape, given.replicas)
        warm = [pusher.push() for _ in range(2)]
        print(
            f"{version.size / 1e6:.1f} MB; the first took {warm[0].first_token:.2f} s", flush=True
        )
        times, gaps = measure(server, pusher, given)
    stages = show(stage_times(times))
    show(gaps)
    write(
        given.json, noted, far=given.far, bytes=version.size, stages=stages, pushes=times, gaps=gaps
    )
    first, (quiet, pushed) = stages[0], gaps
    reached = first.p50 <= P50_GOAL_S and first.p99 <= P99_GOAL_S
    return 0 if reached and pushed.p99 <= GAP_GOAL * quiet.p99 else 1


def measure(
    server: Server, pusher: Pusher, given: argparse.Namespace
) -> tuple[list[PushTimes], list[StreamGaps]]:
    """Return the times of all pushes, and the streams' gaps without and with pushes.

    given: options of the command line.
    """
    times: list[PushTimes] = []
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for period in range(2 * given.periods):
        pushes = bool(period % 2)
        with ThreadPoolExecutor(1) as beside:
            sessions = _streams(given, period)
            streams = beside.submit(run_sessions, server, sessions, given.clients)
            due_s = time.monotonic() + _STREAMS_BEGIN_S
            while not _ended_by(streams, due_s):
                if pushes:
                    times.append(pusher.push())
                else:
                    pusher.ask()
                due_s = max(due_s + given.every, time.monotonic())
            gaps[pushes] += gaps_s(all_whole(streams.result()))
    return times, [_gaps(pushes, found) for pushes, found in gaps.items()]


def stage_times(times: Sequence[PushTimes]) -> list[StageTimes]:
    """Summarise each field of PushTimes over all pushes."""
    rows = []
    for name in PushTimes.__slots__:
        took_s = [getattr(each, name) for each in times]
        p50, p99, most = (round(float(np.percentile(took_s, p)), 4) for p in (50, 99, 100))
        rows.append(StageTimes(name, p50, p99, most))
    return rows


def _gaps(pushes: bool, found_s: Sequence[float]) -> StreamGaps:
    p50, p99, most = (round(1e3 * float(np.percentile(found_s, p)), 3) for p in (50, 99, 100))
    return StreamGaps(pushes, len(found_s), p50, p99, most)


def _ended_by(streams: "Future[list[StreamedAnswer]]", due_s: float) -> bool:
    """Wait until `due_s`; return whether the streams ended before that time."""
    while time.monotonic() < due_s and not streams.done():
        time.sleep(0.01)
    return streams.done()


def _streams(given: argparse.Namespace, period: int) -> list[Session]:
    """Return the streams of one period, which begin together and are dealt round over the
    registered adapters.

    period: number of the period, a seed of the prompts.
    """
    return [
        Session(
            0.0,
            tuple(
                LoadRequest(
                    model_name(number % given.adapters),
                    32,
                    given.tokens,
                    seed=10_000 * period + 100 * number + turn,
                )
                for turn in range(given.rounds)
            ),
        )
        for number in range(given.streams * given.replicas)
    ]


def _version(given: argparse.Namespace) -> NewVersions:
    """Make the first blob of the pushed adapter, and keep it in memory only."""
    folder = given.folder / _OWN / "trained"
    shape = BaseShape.from_config(SHAPES[given.shape])
    save_adapter(folder, shape, given.rank, FIRST_ALPHA)
    write_blob(folder, folder / "blob")
    version = NewVersions((folder / "blob").read_bytes())
    shutil.rmtree(folder)
    return version


def _variables(given: argparse.Namespace) -> dict[str, str]:
    room = (given.adapters + 8) * image_bytes(given.shape, given.rank, given.device)
    return settings_of_model(
        given,
        _OWN,
        replicas=given.replicas,
        gateways=given.gateways,
        max_context=2048,
        max_batch_tokens=given.batch_tokens,
        max_running=2 * given.streams + given.replicas,
        adapter_gpu_memory=room,
        adapter_host_memory=room,
        adapter_disk=max(2**30, 4 * room),
    )


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add("--rank", type=int, default=32, help="rank of every adapter; default 32")
    add("--adapters", type=int, default=8, help="adapters of the streams; default 8")
    add("--replicas", type=int, default=2, help="replicas of one GPU; default 2")
    add("--gateways", type=int, default=2, help="number of gateways; default 2")
    add("--clients", type=int, default=2, help="client processes of the streams; default 2")
    add("--proxy", choices=PROXIES, default="HAProxy")
    add("--far", action="store_true", help="send files in parts, as to another machine")
    add("--streams", type=int, default=64, help="streams of each replica; default 64")
    add("--tokens", type=int, default=512, help="tokens of each request; default 512")
    add("--rounds", type=int, default=4, help="requests of a stream in a period; default 4")
    add(
        "--periods", type=int, default=3, help="periods with pushes, and as many without; default 3"
    )
    add("--every", type=float, default=1.0, help="seconds between two pushes; default 1")
    add("--batch-tokens", type=int, default=2048, help="most tokens of a step; default 2048")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
