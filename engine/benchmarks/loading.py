"""How long until a cold adapter is used, and what that costs those who decode meanwhile.

python -m engine.benchmarks.loading --json loading.json

Llama-3.1-8B's shapes, adapters of rank 16 on all linears, an engine in a process of its own. First
tokens: one request after another, of 16 tokens, in turns with an adapter that is on the GPU, on the
host and on the disk (as the disk's tier keeps it, in page cache), on an idle engine and beside 128
sequences that decode with 64 adapters. What loading adds is told by differences; the image of
84 MB alone takes 1.5 ms over PCIe 5 at 55 GB/s.

Others' tokens: the same sequences decode while ten adapters a second are loaded from nowhere, from
the host and from the disk, in turns. They are prefetched, so no prefill is in the figures. Tokens
are held against a plain forward pass before anything is timed.
"""

import itertools
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from engine.benchmarks import harness, hosted
from engine.benchmarks.offline import request_of
from engine.benchmarks.tiered_engine import TierCounts, tiered_engine, write_random_blobs
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.engine import Engine
from lorikeet_engine.request import Request
from lorikeet_engine.telemetry.status import AdapterStatus
from lorikeet_engine.traffic import Floats

STREAMS = 128
ROUNDS, AT_A_TIME = 60, 15  # streams begin anew after so many, lest their contexts grow
LOADS_PER_S, PHASE_S, PHASES = 10.0, 4.0, 3
_PROMPT, _STREAM_TOKENS = 16, 1200
_WARM_TOKENS = 8  # that each stream has made before anything beside it is timed
_PAUSE_S = 0.01
_WITHIN_S = 60.0
_TIERS = (Residency.GPU, Residency.HOST, Residency.DISK)

Adapters = Mapping[Residency, Iterator[AdapterRef]]
"""By where a request finds them, in turn, without end."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Milliseconds to first tokens beside so many streams: p50 and p99.

    added_ms: how much more either is than with an adapter that is on the GPU.
    """

    streams: int
    found: str
    ms: list[float]
    added_ms: list[float]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Milliseconds between tokens of streams while adapters are loaded: p50 and p99.

    phases_ms: of each phase alone. growth: of all phases, as a share of those without loads.
    behind_ms: from a phase's end until the last adapter had come, at worst.
    """

    loads_from: str
    ms: list[float]
    phases_ms: list[list[float]]
    growth: list[float]
    behind_ms: float


class Client(hosted.Client):
    """One that asks for adapters that lie in different tiers."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._numbers = itertools.count()
        self._random = np.random.default_rng(1)
        super().__init__(build)

    def first_token_s(self, ref: AdapterRef, found: Residency) -> float:
        """Seconds until a request has its one token; raises where its adapter was not `found`."""
        request, began_s = self._request(ref, 1), time.perf_counter()
        taken = self.host.submit(request)
        self.until(lambda: self.came_s[request.request_id], _WITHIN_S)
        assert taken.result() is found, f"{ref} was found on {taken.result()}: want {found}"
        return self.came_s[request.request_id][0] - began_s

    @contextmanager
    def streams(self, refs: Iterator[AdapterRef], count: int) -> Iterator[list[str]]:
        """`count` sequences that decode inside, each with the next of the adapters: their ids."""
        requests = [self._request(next(refs), _STREAM_TOKENS) for _ in range(count)]
        ids = [request.request_id for request in requests]
        for request in requests:
            self.host.submit(request)
        self.until(lambda: all(len(self.came_s[i]) >= _WARM_TOKENS for i in ids), _WITHIN_S)
        yield ids
        self.until(lambda: True, _WITHIN_S)  # raises what went wrong meanwhile
        assert self.ended.isdisjoint(ids), f"streams ended after {_STREAM_TOKENS} tokens"
        for request_id in ids:
            self.host.abort(request_id)
        while self.host.status.live.running:
            time.sleep(0.01)

    def gaps_ms(self, ids: Sequence[str], begin_s: float, end_s: float) -> list[float]:
        """All times from one token of a stream to its next between two moments."""
        within = ([t for t in self.came_s[i] if begin_s <= t <= end_s] for i in ids)
        return [1e3 * (after - before) for times_s in within for before, after in pairwise(times_s)]

    def load(self, refs: Iterator[AdapterRef], found: Residency, until_s: float) -> AdapterRef:
        """Have adapters loaded, LOADS_PER_S; the last of them. Raises where one was not `found`."""
        due_s = time.perf_counter()
        while due_s < until_s:
            time.sleep(max(0.0, due_s - time.perf_counter()))
            ref = next(refs)
            nearer = {status.ref: status.residency for status in self._adapters(Residency.HOST)}
            was = nearer.get(ref, Residency.DISK)
            assert was is found, f"{ref} was found on {was}: want {found}"
            self.host.prefetch(ref, uses=1.0)  # before all that was used earlier
            due_s += 1 / LOADS_PER_S
        return ref

    def arrival_of(self, ref: AdapterRef) -> None:
        """Return once the adapter is on the GPU."""
        end_s = time.perf_counter() + _WITHIN_S
        while all(
            a.ref != ref or a.residency is not Residency.GPU for a in self._adapters(Residency.GPU)
        ):
            assert time.perf_counter() < end_s, f"{ref} was not loaded"
            time.sleep(0.001)

    def _request(self, ref: AdapterRef, tokens: int) -> Request:
        prompt = self._random.integers(0, self.host.info.vocab_size, _PROMPT).tolist()
        salt = secrets.token_hex(8)  # nothing is in the prefix cache
        return request_of(str(next(self._numbers)), prompt, tokens, ref, salt)

    def _adapters(self, tier: Residency) -> Sequence[AdapterStatus]:
        rows = self.host.adapters(tier).result()
        return [AdapterStatus(*row) for row in rows]  # type: ignore[arg-type]


def first_tokens(client: Client, adapters: Adapters, streams: int) -> list[FirstToken]:
    """One request after another, their adapters from each tier in turn; prints the rows."""
    took_ms: dict[Residency, list[float]] = {tier: [] for tier in _TIERS}
    for begun in range(0, ROUNDS, AT_A_TIME):
        with client.streams(adapters[Residency.GPU], streams):
            for _, tier in itertools.product(range(min(AT_A_TIME, ROUNDS - begun)), _TIERS):
                time.sleep(_PAUSE_S)
                took_ms[tier].append(1e3 * client.first_token_s(next(adapters[tier]), tier))
    warm = _percentiles(took_ms[Residency.GPU])
    return harness.show(
        _first_token(streams, tier, _percentiles(took_ms[tier]), warm) for tier in _TIERS
    )


def gaps(client: Client, adapters: Adapters, streams: int) -> list[Gaps]:
    """Streams alone, beside loads from the host and from the disk, in turns; prints the rows."""
    sources = (None, Residency.HOST, Residency.DISK)
    phases: dict[Residency | None, list[list[float]]] = {source: [] for source in sources}
    behind_s = dict.fromkeys(sources, 0.0)
    for _, source in itertools.product(range(PHASES), sources):
        with client.streams(adapters[Residency.GPU], streams) as ids:
            begin_s = time.perf_counter()
            end_s = begin_s + PHASE_S
            last = source and client.load(adapters[source], source, end_s)
            time.sleep(max(0.0, end_s - time.perf_counter()))
            phases[source].append(client.gaps_ms(ids, begin_s, end_s))
            if last:
                client.arrival_of(last)
                behind_s[source] = max(behind_s[source], time.perf_counter() - end_s)
    alone = _percentiles(np.concatenate(phases[None]))
    return harness.show(
        _gaps(source, phases[source], alone, behind_s[source]) for source in sources
    )


def main() -> None:
    """Measure all of it on one engine."""
    options = harness.arguments(__doc__).parse_args()
    facts = harness.facts(options.commit)
    with tempfile.TemporaryDirectory() as name:
        folder, counts = Path(name), TierCounts()
        blobs = write_random_blobs(folder / "blobs", counts)
        build = partial(tiered_engine, folder, blobs, counts)
        adapters = {tier: itertools.cycle(refs) for tier, refs in counts.refs(blobs).items()}
        with Client(build) as client:
            firsts = [
                row for streams in (0, STREAMS) for row in first_tokens(client, adapters, streams)
            ]
            between = gaps(client, adapters, STREAMS)
    harness.write(options.json, facts, first_tokens=firsts, gaps=between)


def _first_token(streams: int, tier: Residency, ms: list[float], warm: list[float]) -> FirstToken:
    added_ms = [round(a - b, 3) for a, b in zip(ms, warm, strict=True)]
    return FirstToken(streams, str(tier), ms, added_ms)


def _gaps(
    source: Residency | None, phases: list[list[float]], alone: list[float], behind_s: float
) -> Gaps:
    ms = _percentiles(np.concatenate(phases))
    growth = [a / b - 1 for a, b in zip(ms, alone, strict=True)]
    phases_ms = [_percentiles(phase) for phase in phases]
    return Gaps(str(source or "nowhere"), ms, phases_ms, growth, 1e3 * behind_s)


def _percentiles(ms: Sequence[float] | Floats) -> list[float]:
    return harness.percentiles(ms, 50, 99)


if __name__ == "__main__":
    main()
