"""How long until a cold adapter is used, and what that costs those who decode meanwhile.

python -m engine.benchmarks.loading --json loading.json

Llama-3.1-8B's shapes, adapters of rank 16 on all linears, an engine in a process of its own. First
tokens: one request after another, of 16 tokens, in turns with an adapter that is on the GPU, on the
host and on the disk (as the disk's tier keeps it, in page cache), on an idle engine and beside 128
sequences that decode with 64 adapters. What loading adds is told by differences; the image of
84 MB alone takes 1.5 ms over PCIe 5 at 55 GB/s.

Others' tokens: the same sequences decode while ten adapters a second are loaded from nowhere, from
the host and from the disk, in turns. The requests for those adapters are withdrawn at once, so
their adapters are loaded and no prefill is in the figures. Tokens are held against a plain forward
pass before anything is timed.
"""

import itertools
import secrets
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from engine.benchmarks import results
from engine.benchmarks.tiered_engine import Places, tiered_engine, write_shelf
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import EngineClosed
from lorikeet_engine.host import EngineHost
from lorikeet_engine.popularity import Floats
from lorikeet_engine.request import AdapterReport, Failed, Output, Request, SamplingParams

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


class Client:
    """An engine in a process of its own, and when its tokens came. Use as a context manager."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._changed = threading.Condition()  # guards the three below
        self._came_s: defaultdict[str, list[float]] = defaultdict(list)
        self._ended: set[str] = set()
        self._error: Exception | None = None
        self._numbers = itertools.count()
        self._random = np.random.default_rng(1)
        self._host = EngineHost(build, self._deliver, self._fail, news=lambda _news: None)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._host.close()

    def first_token_s(self, ref: AdapterRef, found: Residency) -> float:
        """Seconds until a request has its one token; raises where its adapter was not `found`."""
        request, began_s = self._request(ref, 1), time.perf_counter()
        taken = self._host.submit(request)
        self._until(lambda: self._came_s[request.request_id])
        assert taken.result() is found, f"{ref} was found on {taken.result()}: want {found}"
        return self._came_s[request.request_id][0] - began_s

    @contextmanager
    def streams(self, refs: Iterator[AdapterRef], count: int) -> Iterator[list[str]]:
        """`count` sequences that decode inside, each with the next of the adapters: their ids."""
        requests = [self._request(next(refs), _STREAM_TOKENS) for _ in range(count)]
        ids = [request.request_id for request in requests]
        for request in requests:
            self._host.submit(request)
        self._until(lambda: all(len(self._came_s[i]) >= _WARM_TOKENS for i in ids))
        yield ids
        self._until(lambda: True)  # raises what went wrong meanwhile
        assert self._ended.isdisjoint(ids), f"streams ended after {_STREAM_TOKENS} tokens"
        for request_id in ids:
            self._host.abort(request_id)
        while self._host.report().result().running:
            time.sleep(0.01)

    def gaps_ms(self, ids: Sequence[str], begin_s: float, end_s: float) -> list[float]:
        """All times from one token of a stream to its next between two moments."""
        within = ([t for t in self._came_s[i] if begin_s <= t <= end_s] for i in ids)
        return [1e3 * (after - before) for times_s in within for before, after in pairwise(times_s)]

    def load(self, refs: Iterator[AdapterRef], found: Residency, until_s: float) -> AdapterRef:
        """Have adapters loaded, LOADS_PER_S; the last of them. Raises where one was not `found`."""
        asked, due_s = [], time.perf_counter()
        while due_s < until_s:
            time.sleep(max(0.0, due_s - time.perf_counter()))
            ref = next(refs)
            request = self._request(ref, 1)
            asked.append((ref, self._host.submit(request)))
            self._host.abort(request.request_id)
            due_s += 1 / LOADS_PER_S
        for ref, taken in asked:
            assert taken.result() is found, f"{ref} was found on {taken.result()}: want {found}"
        return asked[-1][0]

    def arrival_of(self, ref: AdapterRef) -> None:
        """Return once the adapter is on the GPU."""
        end_s = time.perf_counter() + _WITHIN_S
        while all(a.ref != ref or a.residency is not Residency.GPU for a in self._adapters()):
            assert time.perf_counter() < end_s, f"{ref} was not loaded"
            time.sleep(0.001)

    def _request(self, ref: AdapterRef, tokens: int) -> Request:
        return Request(
            str(next(self._numbers)),
            (tuple(self._random.integers(0, self._host.config.vocab_size, _PROMPT).tolist()),),
            SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            adapter=ref,
            salt=secrets.token_hex(8),  # nothing is in the prefix cache
        )

    def _adapters(self) -> Sequence[AdapterReport]:
        return self._host.report().result().adapters

    def _until(self, holds: Callable[[], object]) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: holds() or self._error, _WITHIN_S)
            if self._error is not None:
                raise self._error
            assert came, f"no answer within {_WITHIN_S:g} s"

    def _deliver(self, outputs: list[Output]) -> None:
        now_s = time.perf_counter()
        with self._changed:
            for output in outputs:
                if isinstance(output, Failed):
                    self._error = output.error
                    continue
                self._came_s[output.request_id] += [now_s] * len(output.token_ids)
                if output.finish is not None:
                    self._ended.add(output.request_id)
            self._changed.notify_all()

    def _fail(self, error: EngineClosed) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()


def first_tokens(client: Client, adapters: Adapters, streams: int) -> list[FirstToken]:
    """One request after another, their adapters from each tier in turn; prints the rows."""
    took_ms: dict[Residency, list[float]] = {tier: [] for tier in _TIERS}
    for begun in range(0, ROUNDS, AT_A_TIME):
        with client.streams(adapters[Residency.GPU], streams):
            for _, tier in itertools.product(range(min(AT_A_TIME, ROUNDS - begun)), _TIERS):
                time.sleep(_PAUSE_S)
                took_ms[tier].append(1e3 * client.first_token_s(next(adapters[tier]), tier))
    rows, warm = [], _percentiles(took_ms[Residency.GPU])
    for tier in _TIERS:
        ms = _percentiles(took_ms[tier])
        added_ms = [round(a - b, 3) for a, b in zip(ms, warm, strict=True)]
        rows.append(FirstToken(streams, str(tier), ms, added_ms))
        print(
            f"first token beside {streams:>3} streams, adapter on the {tier!s:<5}"
            f"p50 {ms[0]:>7.2f} ms ({added_ms[0]:+.2f})  "
            f"p99 {ms[1]:>7.2f} ms ({added_ms[1]:+.2f})",
            flush=True,
        )
    return rows


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
    rows, alone = [], _percentiles(np.concatenate(phases[None]))
    for source in sources:
        ms = _percentiles(np.concatenate(phases[source]))
        rows.append(
            Gaps(
                str(source or "nowhere"),
                ms,
                [_percentiles(phase) for phase in phases[source]],
                [a / b - 1 for a, b in zip(ms, alone, strict=True)],
                1e3 * behind_s[source],
            )
        )
        print(
            f"{streams} streams' tokens, {LOADS_PER_S:g} loads/s from {rows[-1].loads_from:<8}"
            f"p50 {ms[0]:>7.2f} ms ({rows[-1].growth[0]:+.1%})  "
            f"p99 {ms[1]:>7.2f} ms ({rows[-1].growth[1]:+.1%})  "
            f"p99 of phases {[p99 for _, p99 in rows[-1].phases_ms]}  "
            f"behind {rows[-1].behind_ms:.0f} ms",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure all of it on one engine."""
    options = results.arguments(__doc__).parse_args()
    facts = results.facts(options.commit)
    with tempfile.TemporaryDirectory() as name:
        folder, places = Path(name), Places()
        shelf = write_shelf(folder / "blobs", places)
        build = partial(tiered_engine, folder, shelf, places)
        adapters = {tier: itertools.cycle(refs) for tier, refs in places.refs(shelf).items()}
        with Client(build) as client:
            firsts = [
                row for streams in (0, STREAMS) for row in first_tokens(client, adapters, streams)
            ]
            between = gaps(client, adapters, STREAMS)
    results.write(
        options.json,
        facts,
        first_tokens=[asdict(row) for row in firsts],
        gaps=[asdict(row) for row in between],
    )


def _percentiles(ms: Sequence[float] | Floats) -> list[float]:
    return [round(float(value), 3) for value in np.percentile(ms, [50, 99])]


if __name__ == "__main__":
    main()
