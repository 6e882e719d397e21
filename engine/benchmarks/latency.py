"""Latency at fixed arrival rates: how long a first token takes, and how long each one after it.

python -m engine.benchmarks.latency --json latency.json --rates 1 5 10 15 --adapters 128

An open loop: requests arrive as a Poisson process, whether or not earlier ones are answered, and a
request's time runs from when it was due. Lengths are those of the Azure conversation trace, cut to
a context of 2,048 tokens, or fixed ones; adapters fall by Zipf's law with s = 1. The engine runs in
a process of its own, as a replica's does. There its tokens are held against a plain forward pass
before anything is timed; by that all adapters that the GPU has room for are on it.
"""

import secrets
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from engine.benchmarks import results
from engine.benchmarks.checked_engine import checked_engine
from engine.benchmarks.offline import Work
from engine.benchmarks.random_adapters import random_refs
from engine.benchmarks.random_engine import SETTINGS
from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import EngineClosed
from lorikeet_engine.host import EngineHost
from lorikeet_engine.popularity import AZURE_CONV, Ints, Zipf, cut_to_context, poisson
from lorikeet_engine.request import Failed, Output, Request, SamplingParams

ROOM = 128
_DRAINED_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What arrives. lengths: fixed (prompt, output) tokens, None for the Azure trace's."""

    rate_per_s: float
    duration_s: float
    adapters: int
    lengths: tuple[int, int] | None = None

    def draw(self, vocab: int, context: int) -> list[tuple[float, Request]]:
        """Requests with the seconds at which they are due, rising; the same every time."""
        rng = np.random.default_rng(round(1e3 * self.rate_per_s))
        times_s = poisson(self.rate_per_s).times(rng, self.duration_s)
        inputs, outputs = self._lengths(rng, len(times_s), context)
        refs = random_refs(self.adapters)
        ranks = Zipf(1.0).draw(rng, max(1, self.adapters), len(times_s))
        salt = secrets.token_hex(8)  # nothing is in the prefix cache
        return [
            (
                float(times_s[i]),
                Request(
                    f"{salt} {i}",
                    (tuple(rng.integers(0, vocab, inputs[i]).tolist()),),
                    SamplingParams(max_tokens=int(outputs[i]), temperature=0.0, ignore_eos=True),
                    adapter=refs[ranks[i]] if refs else None,
                    salt=salt,
                ),
            )
            for i in range(len(times_s))
        ]

    def _lengths(self, rng: np.random.Generator, requests: int, context: int) -> tuple[Ints, Ints]:
        if self.lengths is None:
            return cut_to_context(*AZURE_CONV.draw(rng, requests), context)
        fixed = np.tile(np.array(self.lengths, np.int64), (requests, 1))
        return fixed[:, 0], fixed[:, 1]


@dataclass(frozen=True, slots=True)
class Row:
    """What one Traffic met. Percentiles: 50, 90 and 99.

    ttft_ms: from when a request was due to its first token. itl_ms: between two of its tokens.
    late_ms: how late requests were sent, which is in ttft_ms. tokens_per_s: output tokens from the
    first request's time to the last token.
    """

    traffic: Traffic
    requests: int
    ttft_ms: list[float]
    itl_ms: list[float]
    late_ms: list[float]
    tokens_per_s: float


class Server:
    """An engine in a process of its own, and what comes out of it. Use as a context manager."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._came: SimpleQueue[tuple[float, list[Output]] | EngineClosed] = SimpleQueue()
        self._host = EngineHost(build, self._deliver, self._came.put, news=lambda _news: None)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._host.close()

    def run(self, traffic: Traffic) -> Row:
        """Send what arrives when it is due, and wait for all the answers."""
        config = self._host.config
        due = traffic.draw(config.vocab_size, config.max_context)
        taken, late_s = [], []
        began_s = time.perf_counter()
        for due_s, request in due:
            time.sleep(max(0.0, began_s + due_s - time.perf_counter()))
            late_s.append(time.perf_counter() - began_s - due_s)
            taken.append(self._host.submit(request))
        for future in taken:
            future.result()
        came_s = self._collect(len(due))
        for _, request in due:
            assert len(came_s[request.request_id]) == request.sampling.max_tokens
        waited_s = [came_s[r.request_id][0] - began_s - due_s for due_s, r in due]
        gaps_s = [b - a for times_s in came_s.values() for a, b in pairwise(times_s)]
        last_s = max(times_s[-1] for times_s in came_s.values())
        return Row(
            traffic,
            len(due),
            ttft_ms=_percentiles(waited_s),
            itl_ms=_percentiles(gaps_s),
            late_ms=_percentiles(late_s),
            tokens_per_s=sum(map(len, came_s.values())) / (last_s - began_s - due[0][0]),
        )

    def _deliver(self, outputs: list[Output]) -> None:
        self._came.put((time.perf_counter(), outputs))

    def _collect(self, requests: int) -> dict[str, list[float]]:
        """When the tokens of each request came; raises what went wrong instead."""
        came_s: defaultdict[str, list[float]] = defaultdict(list)
        while requests:
            came = self._came.get(timeout=_DRAINED_WITHIN_S)
            if isinstance(came, EngineClosed):
                raise came
            now_s, outputs = came
            for output in outputs:
                if isinstance(output, Failed):
                    raise output.error
                came_s[output.request_id] += [now_s] * len(output.token_ids)
                requests -= output.finish is not None
        return came_s


def measure_all(server: Server, traffics: Iterable[Traffic]) -> list[Row]:
    """Measure in this order; prints each row as it comes. Milliseconds."""
    print("  rate  requests   TTFT p50      p90      p99    ITL p50     p99     tok/s  late p99")
    rows = []
    for traffic in traffics:
        row = server.run(traffic)
        ttft, itl = row.ttft_ms, row.itl_ms
        print(
            f"{traffic.rate_per_s:>6g}{row.requests:>10}{ttft[0]:>11.1f}{ttft[1]:>9.1f}"
            f"{ttft[2]:>9.1f}{itl[0]:>11.1f}{itl[2]:>8.1f}{row.tokens_per_s:>10,.0f}"
            f"{row.late_ms[2]:>10.1f}",
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> None:
    """Measure every rate on one engine."""
    parser = results.arguments(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 5, 10, 15, 20])
    parser.add_argument("--seconds", type=float, default=20, help="of arrivals at each rate")
    parser.add_argument("--adapters", type=int, default=ROOM, help="0 for the base model alone")
    parser.add_argument("--lengths", type=int, nargs=2, help="fixed: tokens in, tokens out")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="of one step")
    options = parser.parse_args()
    facts = results.facts(options.commit)
    lengths = tuple(options.lengths) if options.lengths else None
    check = Work("check", 200, 32, options.adapters, max(8, min(ROOM, options.adapters)))
    with tempfile.TemporaryDirectory() as folder:
        build = partial(
            checked_engine,
            check,
            folder=Path(folder),
            adapters=options.adapters,
            room=min(ROOM, options.adapters),
            settings=replace(SETTINGS, max_batch_tokens=options.batch_tokens),
        )
        with Server(build) as server:
            rows = measure_all(
                server,
                [Traffic(r, options.seconds, options.adapters, lengths) for r in options.rates],
            )
    results.write(options.json, facts, latency=[asdict(row) for row in rows])


def _percentiles(seconds: list[float]) -> list[float]:
    return [round(float(ms), 2) for ms in np.percentile(seconds, [50, 90, 99]) * 1e3]


if __name__ == "__main__":
    main()
