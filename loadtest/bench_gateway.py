"""Gateway overhead: delay added to the first token, and tokens per second of one gateway.

python -m loadtest.bench_gateway

The real gateway behind Serve's own HTTP proxy, as `make serve` deploys it, and behind HAProxy, as
on Kubernetes. Its only replica replays: the first token is ready at once, further ones come at a
steady pace, and tokens since the last read go out as one delta, as from a real replica. The client,
one process with a bare socket for each stream, shares the cores; the CPU share of each process is
printed.

The added delay is the time to the first token of a chat, less the time to the first token of a bare
ASGI application behind the same proxy. The replay takes no time, so the difference is the gateway
and its way to the replica and back. Chats, responses, messages and the bare application take turns.

Prints the times and rates for each proxy; exits with 1 if a goal is missed.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from ray import serve

from loadtest.client import (
    Server,
    Session,
    chat_request,
    host_and_port,
    message_request,
    response_request,
    send_all,
    send_on,
)
from loadtest.cluster import PROXIES, ROOT, cluster, settle
from loadtest.ports import free_port
from loadtest.real_service.adapters import fill_catalog, model_name
from loadtest.real_service.service import CpuUsage
from loadtest.replay_replica import BareApp, ReplayReplica
from loadtest.report import all_whole, gaps_s, quantiles_ms, ttfts_s
from loadtest.streamed_answer import MESSAGES, RESPONSES, LoadRequest, StreamedAnswer
from lorikeet.addresses import Address
from lorikeet.serving.deployments import controller, engine, gateway
from lorikeet.settings import Settings

MOST_ADDED_MS = 4.0
MOST_LATER_MS = 0.3
"""Goal: at p50, another API's first token comes at most this many milliseconds later than a
chat's.
"""
LEAST_TOKENS_PER_S = 20_000
BASE_MODEL = "lorikeet-demo"
BARE = "/bare"
TEXT = "word " * 50
ALONE = 1_000  # sequential requests of each kind
WARM_UP_S = 4.0


class Asked(NamedTuple):
    """Request and its encoded bytes."""

    request: LoadRequest
    encoded: bytes


@dataclass(frozen=True, slots=True)
class StreamThroughput:
    """Throughput of all streams together.

    gaps_s: seconds between deltas of one stream.
    """

    tokens_per_s: float
    deltas_per_s: float
    gaps_s: list[float]


async def measure_streams(
    url: str, request: LoadRequest, encoded: bytes, streams: int, seconds: float
) -> tuple[StreamThroughput, dict[str, float]]:
    """Run N streams for `seconds`; return their throughput and each process's share of a core.

    request, encoded: request of every stream, and its bytes.
    """
    sessions, start_s = [Session(0.0, (request,))] * streams, time.monotonic()
    sending = asyncio.create_task(send_all(url, sessions, {request: encoded}, start_s))
    await asyncio.sleep(WARM_UP_S)
    began_s, client_s = time.monotonic() - start_s, time.process_time()
    with CpuUsage() as cores:
        await asyncio.sleep(seconds)
    ended_s = time.monotonic() - start_s
    took_s = ended_s - began_s
    shares = {"client": (time.process_time() - client_s) / took_s} | cores.used(took_s)
    tokens, deltas = 0, 0
    answers = all_whole(await sending)
    for answer in answers:
        counted = [began_s <= at_s < ended_s for at_s in answer.deltas_s]
        tokens += sum(compress(answer.events, counted))
        deltas += sum(counted)
        answer.deltas_s = list(compress(answer.deltas_s, counted))
    return StreamThroughput(tokens / took_s, deltas / took_s, gaps_s(answers)), shares


def measure_first_tokens(url: str, asked: Mapping[str, Asked]) -> dict[str, list[float]]:
    """Return the seconds to the first token of each kind of request, on open connections.

    The order of kinds is drawn for each turn, since a request finds the gateway idle if one of the
    bare application came before it.
    asked: request of each kind.
    """
    took: dict[str, list[float]] = {name: [] for name in asked}
    connections = {name: socket.create_connection(host_and_port(url)) for name in asked}
    drawn = random.Random(0)
    for _ in range(ALONE):
        for name in drawn.sample(list(asked), len(asked)):
            request, encoded = asked[name]
            answer = StreamedAnswer(request, due_s=time.perf_counter())
            send_on(connections[name], encoded, answer, time.perf_counter)
            took[name] += ttfts_s(all_whole([answer]))
    return {name: times[ALONE // 4 :] for name, times in took.items()}


def of_every_api(server: Server, one: LoadRequest) -> dict[str, Asked]:
    """Return the same request for each API and for the bare application, by kind.

    one: the request, for a chat.
    """
    response, message = replace(one, format=RESPONSES), replace(one, format=MESSAGES)
    return {
        "chat": Asked(one, chat_request(server, one, TEXT)),
        "responses": Asked(response, response_request(server, response, TEXT)),
        "messages": Asked(message, message_request(server, message, TEXT)),
        "bare": Asked(one, chat_request(server, one, TEXT, BARE)),
    }


@contextmanager
def service(settings: Settings, pace: float, proxy: str) -> Iterator[str]:
    """Run the gateway with a replica that replays, and the bare application; yield their URL.

    pace: steps per second of the replay, each of which gives every stream a token.
    proxy: a name in PROXIES.
    """
    deployment: Any = engine(settings, BASE_MODEL)._bound_deployment.options(
        func_or_class=ReplayReplica
    )
    engines = {BASE_MODEL: deployment.bind(BASE_MODEL, settings, pace)}
    bare = serve.deployment(name="bare", ray_actor_options={"num_cpus": 0.1})(
        serve.ingress()(BareApp)
    )
    with cluster(proxy) as url:
        serve.run(gateway(settings, engines, controller(settings, engines)))
        serve.run(bare.bind(), name="bare", route_prefix=BARE)
        settle(proxy)
        yield url


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--proxies", nargs="+", choices=PROXIES, default=list(PROXIES))
    parser.add_argument("--streams", type=int, default=256, help="streams at once; default 256")
    parser.add_argument(
        "--pace", type=float, default=100, help="tokens per second of a stream; default 100"
    )
    parser.add_argument(
        "--seconds", type=float, default=10, help="seconds of streaming; default 10"
    )
    parser.add_argument("--json", type=Path, help="JSON file for the results")
    given = parser.parse_args()
    machine = {"cpus": os.cpu_count(), "busy_before": round(os.getloadavg()[0], 1)}
    print(f"{machine['cpus']} CPUs, {machine['busy_before']} of them busy before")
    rows = [measure(proxy, given) for proxy in given.proxies]
    if given.json:
        given.json.write_text(json.dumps(machine | {"proxies": rows}, indent=2) + "\n")
    return 0 if all(map(_meets_the_goals, rows)) else 1


def measure(proxy: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure streams and first tokens behind one proxy, and print the results.

    proxy: a name in PROXIES.
    given: options of the command line.
    """
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
        with service(settings, given.pace, proxy) as url:
            server = Server(url, key, vocabulary=0)
            took = measure_first_tokens(url, of_every_api(server, one))
            request = chat_request(server, many, TEXT)
            streaming = measure_streams(url, many, request, given.streams, given.seconds)
            received, shares = asyncio.run(streaming)
    row = {"proxy": proxy, **_first_tokens_ms(took)}
    row |= {
        "tokens_per_s": received.tokens_per_s,
        "deltas_per_s": received.deltas_per_s,
        "between_ms": quantiles_ms(received.gaps_s),
        "cores": shares,
    }
    print(*_lines(row, f"{given.streams} streams of {given.pace:g} tokens/s"), sep="\n", flush=True)
    return row


def _first_tokens_ms(took: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return times to first tokens: quantiles of each kind of request, a chat's p50 less the bare
    application's, and other APIs' p50 less a chat's.

    took: seconds to first tokens, by kind.
    """
    first_ms = {name: quantiles_ms(times) for name, times in took.items()}

    def after_ms(sooner: str, later: str) -> float:
        return round(first_ms[later]["p50"] - first_ms[sooner]["p50"], 2)

    others = ("responses", "messages")
    return {
        "first_ms": first_ms,
        "added_ms": after_ms("bare", "chat"),
        "later_than_chat_ms": {name: after_ms("chat", name) for name in others},
    }


def _meets_the_goals(row: Mapping[str, Any]) -> bool:
    return (
        row["added_ms"] <= MOST_ADDED_MS
        and max(row["later_than_chat_ms"].values()) <= MOST_LATER_MS
        and row["tokens_per_s"] >= LEAST_TOKENS_PER_S
    )


def _lines(row: Mapping[str, Any], streams: str) -> Iterator[str]:
    yield f"\n{row['proxy']}"
    yield "  first token, ms     p50     p99   p50 after chat's"
    for name, ms in row["first_ms"].items():
        later_ms = row["later_than_chat_ms"].get(name)
        later = "" if later_ms is None else f"{later_ms:+19.2f}"
        yield f"  {name:15}{ms['p50']:8.2f}{ms['p99']:8.2f}{later}"
    yield f"  added by gateway and way to the replica: {row['added_ms']:.2f} ms at p50"
    between = row["between_ms"]
    yield (
        f"  {streams}: {row['tokens_per_s']:,.0f} tokens/s in {row['deltas_per_s']:,.0f} deltas/s; "
        f"between two of a stream p50 {between['p50']:.0f} ms, p99 {between['p99']:.0f} ms"
    )
    busy = sorted(row["cores"].items(), key=lambda share: -share[1])
    yield "  of one core: " + ", ".join(f"{name} {share:.0%}" for name, share in busy)


if __name__ == "__main__":
    sys.exit(main())
