"""Prefixes of 2,048 tokens on the GPU, on the host and not cached: first tokens, and others' gaps.

python -m loadtest.engine.host_prefixes --json host_prefixes.json [--config llama-3.1-8b]
    [--kv-host-bytes 34359738368]

First checks the tokens behind a prefix that came from the host. Then times, by turns, the first
token of a lone request with 16 tokens behind each kind of prefix. Then times the gaps between
tokens of 32 streams, alone and beside such requests, one every ten steps: an answer of one token
behind a prefix that is on the GPU, and behind one that comes from the host. Prints a row for each.
"""

import argparse
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from statistics import median
from time import perf_counter

import numpy as np

from loadtest.engine import harness, plain
from loadtest.engine.offline import abort, begin, generate, request_of
from lorikeet_engine.engine import Engine

CACHED, MORE = 2048, 16
"""Tokens of a prefix, and tokens behind it."""
TURNS = 7
STREAMS, STEPS, EVERY = 32, 400, 10
"""Streams whose gaps are timed, steps of them, and steps from one request beside them to the
next."""
_KV_BYTES, _HOST_BYTES = 6 << 30, 32 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """Times to the first token behind one kind of prefix.

    prefix: place of the prefix before the request.
    ms: median of turns_ms.
    turns_ms: milliseconds to the first token in each turn.
    """

    prefix: str
    ms: float
    turns_ms: list[float]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between tokens of streams, in milliseconds.

    beside: prefixes of the requests that ran beside the streams.
    requests: number of these requests.
    """

    beside: str
    p50_ms: float
    p99_ms: float
    requests: int


class Prefixes:
    """Asks an engine for first tokens behind prefixes, one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._rng = engine, np.random.default_rng(1)
        self.salt = secrets.token_hex(4)
        live, groups = engine.status().live, len(engine._runner.kv_windows)
        page_size = engine._settings.page_size
        self.on_gpu = live.kv_pages_total // groups * page_size // (CACHED + MORE)
        """Number of prefixes for which the GPU has room."""

    def draw(self, tokens: int) -> list[int]:
        """Return random tokens."""
        return self._rng.integers(0, self._engine.info.vocab_size, tokens).tolist()

    def ask(self, prefix: list[int]) -> float:
        """Return the milliseconds to the first token behind a prefix and MORE random tokens."""
        request = request_of(secrets.token_hex(4), prefix + self.draw(MORE), 1, None, self.salt)
        began_s = perf_counter()
        generate(self._engine, [request])
        return 1e3 * (perf_counter() - began_s)

    def push_out(self) -> None:
        """Ask for other prompts until no earlier prefix is on the GPU."""
        for _ in range(self.on_gpu + 2):
            self.ask(self.draw(CACHED))

    def ask_from_host(self, prefix: list[int]) -> float:
        """Return `ask` of a prefix that is on the host alone.

        Raises AssertionError if the prefix does not come from the host.
        """
        before = tokens_from_host(self._engine)
        took_ms = self.ask(prefix)
        found = tokens_from_host(self._engine) - before
        assert found == CACHED, f"{found} of {CACHED} tokens came from the host"
        return took_ms


def tokens_from_host(engine: Engine) -> int:
    """Return the number of prompt tokens whose pages came from the host since the start."""
    pages = engine.status().host_pages
    assert pages is not None, "the engine keeps no pages on the host"
    return pages.tokens


def first_tokens(engine: Engine) -> Iterator[Row]:
    """Check the tokens behind a prefix from the host, then yield a row for each kind of prefix.

    Raises AssertionError if the engine's tokens are wrong.
    """
    prefixes = Prefixes(engine)
    _check(engine, prefixes)
    misses, hits, from_host = (list[float]() for _ in range(3))
    for _ in range(TURNS + 1):
        prefix = prefixes.draw(CACHED)
        misses.append(prefixes.ask(prefix))
        hits.append(prefixes.ask(prefix))
        prefixes.push_out()
        from_host.append(prefixes.ask_from_host(prefix))
    yield _row("not cached", misses)
    yield _row("on the GPU", hits)
    yield _row("on the host", from_host)


def gaps(engine: Engine) -> Iterator[Gaps]:
    """Yield the gaps of streams alone, beside prefixes on the GPU, and beside prefixes from the
    host.

    Raises AssertionError if prefixes are not where they should be.
    """
    prefixes = Prefixes(engine)
    yield _gaps(engine, "nothing", prefixes, [])
    few = [prefixes.draw(CACHED) for _ in range(2)]
    before = tokens_from_host(engine)
    yield _gaps(engine, "prefixes on the GPU", prefixes, few)
    assert tokens_from_host(engine) == before, "prefixes came from the host"
    many = [prefixes.draw(CACHED) for _ in range(prefixes.on_gpu + 2)]
    row = _gaps(engine, "prefixes from the host", prefixes, many)
    came = (tokens_from_host(engine) - before) // CACHED
    assert came >= row.requests - 1, f"{came} of {row.requests} prefixes came from the host"
    yield row


def _gaps(engine: Engine, beside: str, prefixes: Prefixes, asked: list[list[int]]) -> Gaps:
    """Compute these prefixes, then time the gaps of streams beside requests for them by turns."""
    for prefix in asked:
        prefixes.ask(prefix)
    streams = [
        request_of(f"stream {i}", prefixes.draw(MORE), 2 * STEPS, None, secrets.token_hex(4))
        for i in range(STREAMS)
    ]
    for request in streams:
        engine.submit(request)
    begin(engine, streams)
    names, turns, ticks_s, sent = {s.request_id for s in streams}, cycle(asked), list[float](), 0
    while len(ticks_s) < STEPS:
        if asked and len(ticks_s) >= sent * EVERY:
            tokens = next(turns) + prefixes.draw(MORE)
            engine.submit(request_of(secrets.token_hex(4), tokens, 1, None, prefixes.salt))
            sent += 1
        if names & {output.request_id for output in engine.step()}:
            ticks_s.append(perf_counter())
    abort(engine, streams)
    times_ms = [1e3 * (end - start) for start, end in pairwise(ticks_s)]
    p50_ms, p99_ms = harness.percentiles(times_ms, 50, 99)
    return Gaps(beside, p50_ms, p99_ms, sent)


def main() -> None:
    """Measure all rows on one engine."""
    parser = harness.arguments(__doc__)
    harness.add_model_arguments(parser)
    parser.set_defaults(kv_bytes=_KV_BYTES)
    parser.add_argument(
        "--kv-host-bytes", type=int, default=_HOST_BYTES, help="bytes of the host's KV pages"
    )
    options: argparse.Namespace = parser.parse_args()
    facts = harness.facts(options.commit)
    model = harness.model_of(options)
    host = {"kv_host_bytes": options.kv_host_bytes, "max_context": 2 * CACHED}
    model["settings"] = replace(model["settings"], **host)
    with harness.full_engine(**model) as engine:
        first = harness.show(first_tokens(engine))
        beside = harness.show(gaps(engine))
    about = harness.about(options) | {"kv_host_bytes": options.kv_host_bytes}
    harness.write(options.json, facts, **about, first_tokens=first, gaps=beside)


def _check(engine: Engine, prefixes: Prefixes) -> None:
    """Raise AssertionError if the tokens behind a prefix from the host are wrong."""
    prefix = prefixes.draw(CACHED)
    prefixes.ask(prefix)
    prefixes.push_out()
    before = tokens_from_host(engine)
    request = request_of("check", prefix + prefixes.draw(MORE), 8, None, prefixes.salt)
    answers = generate(engine, [request]).answers
    assert tokens_from_host(engine) - before == CACHED, "the prefix does not come from the host"
    plain.check(engine, answers)


def _row(prefix: str, times_ms: list[float]) -> Row:
    """Return the row of times, without the first, which may compile kernels."""
    return Row(prefix, median(times_ms[1:]), [round(each, 2) for each in times_ms[1:]])


if __name__ == "__main__":
    main()
