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
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from engine.benchmarks import harness
from engine.benchmarks.hosted import Client, checked_engine
from engine.benchmarks.offline import Work, greedy
from engine.benchmarks.random_adapters import random_refs
from engine.benchmarks.random_engine import SETTINGS
from lorikeet_engine.popularity import AZURE_CONV, Ints, Zipf, cut_to_context, poisson
from lorikeet_engine.request import Request

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
        prompts = [rng.integers(0, vocab, length).tolist() for length in inputs]
        chosen = [refs[rank] if refs else None for rank in ranks]
        return [
            (float(at_s), greedy(f"{salt} {i}", prompt, int(tokens), adapter, salt))
            for i, (at_s, prompt, tokens, adapter) in enumerate(
                zip(times_s, prompts, outputs, chosen, strict=True)
            )
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


def measure(client: Client, traffic: Traffic) -> Row:
    """Send what arrives when it is due, and wait for all the answers."""
    config = client.host.config
    due = traffic.draw(config.vocab_size, config.max_context)
    taken, late_s = [], []
    began_s = time.perf_counter()
    for due_s, request in due:
        time.sleep(max(0.0, began_s + due_s - time.perf_counter()))
        late_s.append(time.perf_counter() - began_s - due_s)
        taken.append(client.host.submit(request))
    for future in taken:
        future.result()
    ids = {request.request_id for _, request in due}
    client.until(lambda: client.ended >= ids, _DRAINED_WITHIN_S)
    came_s = [client.came_s[request.request_id] for _, request in due]
    for times_s, (_, request) in zip(came_s, due, strict=True):
        assert len(times_s) == request.sampling.max_tokens
    waited_s = [t[0] - began_s - due_s for t, (due_s, _) in zip(came_s, due, strict=True)]
    gaps_s = [b - a for times_s in came_s for a, b in pairwise(times_s)]
    last_s = max(times_s[-1] for times_s in came_s)
    return Row(
        traffic,
        len(due),
        ttft_ms=_percentiles_ms(waited_s),
        itl_ms=_percentiles_ms(gaps_s),
        late_ms=_percentiles_ms(late_s),
        tokens_per_s=sum(map(len, came_s)) / (last_s - began_s - due[0][0]),
    )


def main() -> None:
    """Measure every rate on one engine."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 5, 10, 15, 20])
    parser.add_argument("--seconds", type=float, default=20, help="of arrivals at each rate")
    parser.add_argument("--adapters", type=int, default=ROOM, help="0 for the base model alone")
    parser.add_argument("--lengths", type=int, nargs=2, help="fixed: tokens in, tokens out")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="of one step")
    options = parser.parse_args()
    facts = harness.facts(options.commit)
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
        traffics = [Traffic(r, options.seconds, options.adapters, lengths) for r in options.rates]
        with Client(build) as client:
            rows = harness.show(measure(client, traffic) for traffic in traffics)
    harness.write(options.json, facts, latency=rows)


def _percentiles_ms(seconds: list[float]) -> list[float]:
    return harness.percentiles([1e3 * each for each in seconds], 50, 90, 99)


if __name__ == "__main__":
    main()
