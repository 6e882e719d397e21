"""What the gateway adds to a first token, and how many tokens a second one gateway passes on.

The real gateway behind Serve's own HTTP proxy, as `make serve` deploys it, and behind HAProxy, as
on Kubernetes. Behind it stands a replica that only replays: its first token is there at once, the
next ones come at a steady pace, and what was made since it was last asked goes out as one delta, as
a real replica's does. The client, a process with a bare socket for each stream, runs on the same
cores; what each process took of them is printed.

Added to a first token: by how much later it comes than from a bare ASGI application behind the same
proxy. The replay takes no time, so that is the gateway and its way to the replica and back.

Usage: python -m loadtest.bench_gateway. Ends with status 1 if a goal is missed.
"""

import argparse
import asyncio
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import psutil
from ray import serve

from loadtest.client import Server, Session, chat_request, host_and_port, send_all, send_on
from loadtest.paced_service.adapters import fill_catalog, model_name
from loadtest.paced_service.service import ROOT, cluster, free_port
from loadtest.replay_replica import BareApp, ReplayReplica
from loadtest.report import all_whole, gaps_s, quantiles_ms, ttfts_s
from loadtest.streamed_answer import LoadRequest, StreamedAnswer
from lorikeet.serving.deployments import controller, engine, gateway
from lorikeet.settings import Address, Settings

MOST_ADDED_S = 4e-3
LEAST_TOKENS_PER_S = 20_000
BASE_MODEL = "lorikeet-demo"
BARE = "/bare"
TEXT = "word " * 50
ALONE = 1_000  # requests to each, one after the other
WARM_UP_S = 4.0
SETTLING_S = 4.0  # HAProxy begins anew, dropping connections, when an application comes
PROXIES = {"Serve's proxy": "0", "HAProxy": "1"}


@dataclass(frozen=True, slots=True)
class StreamThroughput:
    """What all streams together received. gaps_s: between two deltas of one stream."""

    tokens_per_s: float
    deltas_per_s: float
    gaps_s: list[float]


async def measure_streams(
    url: str, request: LoadRequest, encoded: bytes, streams: int, seconds: float
) -> tuple[StreamThroughput, dict[str, float]]:
    """What N streams received in `seconds`, and each process's share of a core."""
    sessions, start_s = [Session(0.0, (request,))] * streams, time.monotonic()
    sending = asyncio.create_task(send_all(url, sessions, {request: encoded}, start_s))
    await asyncio.sleep(WARM_UP_S)
    began_s, cpu_s = time.monotonic() - start_s, _cpu_s()
    await asyncio.sleep(seconds)
    ended_s = time.monotonic() - start_s
    took_s = ended_s - began_s
    shares = {name: (spent_s - cpu_s[name]) / took_s for name, spent_s in _cpu_s().items()}
    tokens, deltas = 0, 0
    answers = all_whole(await sending)
    for answer in answers:
        counted = [began_s <= at_s < ended_s for at_s in answer.deltas_s]
        tokens += sum(compress(answer.events, counted))
        deltas += sum(counted)
        answer.deltas_s = list(compress(answer.deltas_s, counted))
    return StreamThroughput(tokens / took_s, deltas / took_s, gaps_s(answers)), shares


def measure_first_tokens(
    url: str, request: LoadRequest, requests: dict[str, bytes]
) -> dict[str, list[float]]:
    """Seconds from sending each request to its first token, asked in turn on open connections."""
    took: dict[str, list[float]] = {name: [] for name in requests}
    connections = {name: socket.create_connection(host_and_port(url)) for name in requests}
    for _ in range(ALONE):
        for name, encoded in requests.items():
            answer = StreamedAnswer(request, due_s=time.perf_counter())
            send_on(connections[name], encoded, answer, time.perf_counter)
            took[name] += ttfts_s(all_whole([answer]))
    return {name: times[ALONE // 4 :] for name, times in took.items()}


def _cpu_s() -> Counter[str]:
    """CPU seconds of this process and those it started, by what they are."""
    spent: Counter[str] = Counter()
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        try:
            times, title = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            continue
        name = next((name for name in ("Proxy", "gateway", "engine") if name in title), "the rest")
        spent["client" if process == here else name.lower()] += times.user + times.system
    return spent


@contextmanager
def service(settings: Settings, pace: float) -> Iterator[str]:
    """The gateway over the replay, and the bare application; their address."""
    deployment: Any = engine(settings, BASE_MODEL)._bound_deployment.options(
        func_or_class=ReplayReplica
    )
    engines = {BASE_MODEL: deployment.bind(BASE_MODEL, settings, pace)}
    bare = serve.deployment(name="bare", ray_actor_options={"num_cpus": 0.1})(
        serve.ingress()(BareApp)
    )
    with cluster() as url:
        serve.run(gateway(settings, engines, controller(settings, engines)))
        serve.run(bare.bind(), name="bare", route_prefix=BARE)
        time.sleep(SETTLING_S)
        yield url


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--proxies", nargs="+", choices=PROXIES, default=list(PROXIES))
    parser.add_argument("--streams", type=int, default=256, help="at once; default 256")
    parser.add_argument("--pace", type=float, default=100, help="tokens a second of each; 100")
    parser.add_argument("--seconds", type=float, default=10, help="of streaming; default 10")
    given = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, {os.getloadavg()[0]:.1f} of them busy before")
    met = [measure(proxy, given) for proxy in given.proxies]
    return 0 if all(met) else 1


def measure(proxy: str, given: argparse.Namespace) -> bool:
    """Both measurements behind one proxy, printed; whether the goals are met."""
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = PROXIES[proxy]
    os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "0"  # nobody else waits for it
    with tempfile.TemporaryDirectory(prefix="lorikeet-bench-") as folder:
        settings = Settings(
            catalog=f"{folder}/catalog",
            cache_dir=Path(folder) / "cache",
            admin_address=Address("127.0.0.1", free_port()),
            base_models={BASE_MODEL: ROOT / "demo/model"},
            replicas=1,
        )
        key = fill_catalog(settings, [8]).key
        one = LoadRequest(model_name(0), 0, 1, seed=0)
        many = replace(one, output_tokens=int(given.pace * (given.seconds + 2 * WARM_UP_S)))
        with service(settings, given.pace) as url:
            server = Server(url, key, vocabulary=0)
            alone = {"gateway": chat_request(server, one, TEXT)}
            alone["bare"] = chat_request(server, one, TEXT, BARE)
            took = measure_first_tokens(url, one, alone)
            request = chat_request(server, many, TEXT)
            streaming = measure_streams(url, many, request, given.streams, given.seconds)
            received, shares = asyncio.run(streaming)
    print(f"\n{proxy}")
    added_s = _print_first_tokens(took)
    _print_streams(received, shares, given)
    return added_s <= MOST_ADDED_S and received.tokens_per_s >= LEAST_TOKENS_PER_S


def _print_first_tokens(took: dict[str, list[float]]) -> float:
    """The seconds that are added."""
    quantiles = {name: quantiles_ms(times) for name, times in took.items()}
    for name, ms in quantiles.items():
        print(f"  first token from {name:8}p50 {ms['p50']:.2f} ms, p99 {ms['p99']:.2f} ms")
    added_ms = quantiles["gateway"]["p50"] - quantiles["bare"]["p50"]
    print(f"  added by gateway and way to the replica: {added_ms:.2f} ms at p50")
    return added_ms / 1e3


def _print_streams(
    received: StreamThroughput, shares: dict[str, float], given: argparse.Namespace
) -> None:
    gaps, asked = (
        quantiles_ms(received.gaps_s),
        f"{given.streams} streams of {given.pace:g} tokens/s",
    )
    print(
        f"  {asked}: {received.tokens_per_s:,.0f} tokens/s in "
        f"{received.deltas_per_s:,.0f} deltas/s; between two of a stream p50 "
        f"{gaps['p50']:.0f} ms, p99 {gaps['p99']:.0f} ms"
    )
    busy = sorted(shares.items(), key=lambda share: -share[1])
    print("  of one core: " + ", ".join(f"{name} {share:.0%}" for name, share in busy))


if __name__ == "__main__":
    sys.exit(main())
