"""What the gateway adds to a first token, and how many tokens a second one gateway passes on.

The real gateway behind Serve's own HTTP proxy, as `make serve` deploys it, and behind HAProxy, as
on Kubernetes. Behind it stands a replica that only replays: its first token is there at once, the
next ones come at a steady pace, and what was made since it was last asked goes out as one piece, as
a real replica's does. The client, a process with a bare socket for each stream, runs on the same
cores; what each process took of them is printed.

Added to a first token: by how much later it comes than from a bare ASGI application behind the same
proxy. The replay takes no time, so that is the gateway and its way to the replica and back.

Usage: python -m loadtest.bench_gateway. Ends with status 1 if a goal is missed.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from ray import serve

from loadtest.fleet.adapters import fill_catalog, model_name
from loadtest.fleet.service import ROOT, cluster, free_port
from loadtest.replay import TOKEN, Bare, Replay
from lorikeet.serving.app import controller, engine, gateway
from lorikeet.settings import Address, Settings

MOST_ADDED_S = 4e-3
LEAST_TOKENS_PER_S = 20_000
BASE_MODEL = "lorikeet-demo"
BARE = "/bare"
ALONE = 1_000  # requests to each, one after the other
WARM_UP_S = 4.0
SETTLING_S = 4.0  # HAProxy begins anew, dropping connections, when an application comes
PROXIES = {"Serve's proxy": "0", "HAProxy": "1"}
_END = b"0\r\n\r\n"


@dataclass(slots=True)
class Received:
    """By all streams together. gaps_s: between two pieces of one stream that held tokens."""

    tokens: int = 0
    chunks: float = 0
    gaps_s: list[float] = field(default_factory=list)


class Stream(asyncio.Protocol):
    """One answer on a connection of its own."""

    def __init__(self, request: bytes, received: Received) -> None:
        self._request, self._received = request, received
        self._last_s = 0.0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count: the events are never parsed, so that the client takes little of the cores."""
        if tokens := data.count(TOKEN):
            now_s = time.perf_counter()
            if self._last_s:
                self._received.gaps_s.append(now_s - self._last_s)
            self._last_s = now_s
            self._received.tokens += tokens
            self._received.chunks += data.count(b"\r") / 2  # around each chunk there are two
        if data.endswith(_END) and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Too early, if it has not ended."""
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("a stream broke off"))


async def measure_streams(
    url: str, request: bytes, streams: int, seconds: float
) -> tuple[Received, dict[str, float]]:
    """What so many streams received in so many seconds, and each process's share of a core."""
    loop, all_received = asyncio.get_running_loop(), Received()
    address = urlsplit(url)
    made = [
        await loop.create_connection(
            lambda: Stream(request, all_received), address.hostname, address.port
        )
        for _ in range(streams)
    ]
    await asyncio.sleep(WARM_UP_S)
    before, cpu_s = Received(all_received.tokens, all_received.chunks), _cpu_s()
    all_received.gaps_s.clear()
    began_s = time.perf_counter()
    await asyncio.sleep(seconds)
    took_s = time.perf_counter() - began_s
    shares = {name: (spent_s - cpu_s[name]) / took_s for name, spent_s in _cpu_s().items()}
    tokens = all_received.tokens - before.tokens
    chunks = all_received.chunks - before.chunks
    counted = Received(round(tokens / took_s), chunks / took_s, list(all_received.gaps_s))
    for transport, stream in made:
        transport.close()
        stream.ended.cancel()
    return counted, shares


def measure_first_tokens(url: str, requests: dict[str, bytes]) -> dict[str, list[float]]:
    """Seconds from sending each request to its first token, asked in turn on open connections."""
    took: dict[str, list[float]] = {name: [] for name in requests}
    address = urlsplit(url)
    connections = {
        name: socket.create_connection((address.hostname, address.port)) for name in requests
    }
    for _ in range(ALONE):
        for name, request in requests.items():
            took[name].append(_first_token_s(connections[name], request))
    return {name: sorted(times[ALONE // 4 :]) for name, times in took.items()}


def _first_token_s(connection: socket.socket, request: bytes) -> float:
    began_s, first_s, answer = time.perf_counter(), 0.0, b""
    connection.sendall(request)
    while not answer.endswith(_END):
        answer += connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        if not first_s and TOKEN in answer:
            first_s = time.perf_counter() - began_s
    return first_s


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


def _request(path: str, key: str, tokens: int) -> bytes:
    body = {
        "model": model_name(0),
        "messages": [{"role": "user", "content": "word " * 50}],
        "max_tokens": tokens,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@contextmanager
def service(settings: Settings, pace: float) -> Iterator[str]:
    """The gateway over the replay, and the bare application; their address."""
    deployment: Any = engine(settings, BASE_MODEL)._bound_deployment.options(func_or_class=Replay)
    engines = {BASE_MODEL: deployment.bind(BASE_MODEL, settings, pace)}
    bare = serve.deployment(name="bare", ray_actor_options={"num_cpus": 0.1})(serve.ingress()(Bare))
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
        path, tokens = "/v1/chat/completions", int(given.pace * (given.seconds + 3 * WARM_UP_S))
        with service(settings, given.pace) as url:
            one_token = {"gateway": _request(path, key, 1), "bare": _request(BARE, key, 1)}
            took = measure_first_tokens(url, one_token)
            many = _request(path, key, tokens)
            streaming = measure_streams(url, many, given.streams, given.seconds)
            received, shares = asyncio.run(streaming)
    print(f"\n{proxy}")
    added_s = _print_first_tokens(took)
    _print_streams(received, shares, given)
    return added_s <= MOST_ADDED_S and received.tokens >= LEAST_TOKENS_PER_S


def _print_first_tokens(took: dict[str, list[float]]) -> float:
    """The seconds that are added."""
    for name, times in took.items():
        p50_ms, p99_ms = _at(times, 0.5) * 1e3, _at(times, 0.99) * 1e3
        print(f"  first token from {name:8}p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms")
    added_s = _at(took["gateway"], 0.5) - _at(took["bare"], 0.5)
    print(f"  added by gateway and way to the replica: {added_s * 1e3:.2f} ms at p50")
    return added_s


def _print_streams(received: Received, shares: dict[str, float], given: argparse.Namespace) -> None:
    gaps = sorted(received.gaps_s)
    print(
        f"  {given.streams} streams of {given.pace:g} tokens/s: {received.tokens:,} tokens/s in "
        f"{received.chunks:,.0f} pieces/s; between two of a stream p50 "
        f"{_at(gaps, 0.5) * 1e3:.0f} ms, p99 {_at(gaps, 0.99) * 1e3:.0f} ms"
    )
    busy = sorted(shares.items(), key=lambda share: -share[1])
    print("  of one core: " + ", ".join(f"{name} {share:.0%}" for name, share in busy))


def _at(times: list[float], share: float) -> float:
    """A quantile of what is in order."""
    return times[int(share * (len(times) - 1))]


if __name__ == "__main__":
    sys.exit(main())
