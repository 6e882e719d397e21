"""Cold adapters: time to the first token, and the cost of loads for decoding sequences.

python -m loadtest.engine.loading --json loading.json [--config qwen3-30b-a3b --streams 64]
    [--tensor-parallel 2 --rank 24]

Llama-3.1-8B's shapes, adapters of rank 16 on all linears, an engine in a process of its own.

- First tokens: requests of 16 tokens one after another, with adapters that are on the GPU, on the
  host and on the disk in turns (the disk tier's files are in the page cache), on an idle engine and
  beside 128 sequences that decode with 64 adapters. The cost of a load is the difference; the image
  of 84 MB alone takes 1.5 ms over PCIe 5 at 55 GB/s.
- Gaps: the same sequences decode while, in turns, no adapters are loaded, ten a second from the
host and ten a second from the disk. The adapters are prefetched, so the gaps include no prefill.
- Loads: adapters of the host one after another, each until it is on the GPU.

Tokens are compared with a plain forward pass before anything is timed. Prints a table for each
part.

Adapters of more than 256 MiB are fewer (tiered_engine.FEW), are not loaded from the disk, and are
loaded more rarely, 4 GiB a second. Ranks that share the base model each load a part of an adapter.
"""

import argparse
import itertools
import secrets
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from loadtest.engine import harness
from loadtest.engine.offline import request_of
from loadtest.engine.random_engine import RANK
from loadtest.engine.tiered_engine import (
    counts_of,
    image_bytes,
    tiered_engine,
    write_random_blobs,
)
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import EngineClosed
from lorikeet_engine.process.client import EngineProcessClient
from lorikeet_engine.request import Failed, Output, Request

STREAMS = 128
ROUNDS, AT_A_TIME = 60, 15  # new streams after 15 keep contexts short
LOADS_PER_S, PHASE_S, PHASES = 10.0, 4.0, 3
LOADED_BYTES_PER_S = 4 << 30  # most bytes loaded while gaps are measured
LOADS = 20  # loads one after another
_PROMPT, _STREAM_TOKENS = 16, 1200
_WARM_TOKENS = 8  # tokens of each stream before anything is timed
_PAUSE_S = 0.01
_WITHIN_S = 60.0

Adapters = Mapping[Residency, Iterator[AdapterRef]]
"""Endless iterators over adapters, by the tier in which a request finds each of these adapters."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Milliseconds to first tokens beside N streams: p50 and p99.

    found: tier in which the adapter was found.
    added_ms: differences to an adapter that is on the GPU.
    """

    streams: int
    found: str
    ms: list[float]
    added_ms: list[float]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Milliseconds between tokens of streams while adapters are loaded: p50 and p99.

    loads_from: tier of the loaded adapters, or `nowhere` without loads.
    phases_ms: values of each phase.
    growth: relative growth over the gaps without loads.
    behind_ms: longest time from a phase's end until its last adapter was loaded.
    """

    loads_from: str
    ms: list[float]
    phases_ms: list[list[float]]
    growth: list[float]
    behind_ms: float


@dataclass(frozen=True, slots=True)
class Load:
    """Loads from the host beside N streams.

    gpu_bytes: bytes of an image on each GPU.
    ready_ms: milliseconds until an adapter was on the GPU, p50 and p99.
    gb_per_s: gpu_bytes over the p50.
    """

    streams: int
    gpu_bytes: int
    ready_ms: list[float]
    gb_per_s: float


class Client:
    """The only client of an engine in a process of its own. Use it as a context manager.

    came_s: time.perf_counter() at each token, by request id.
    ended: ids of whole answers.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._numbers = itertools.count()
        self._random = np.random.default_rng(1)
        self._changed = threading.Condition()  # guards came_s, ended and _error
        self.came_s: defaultdict[str, list[float]] = defaultdict(list)
        self.ended: set[str] = set()
        self._error: Exception | None = None
        self.host = EngineProcessClient(build, self._deliver, self._fail, lambda _status: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.host.close()

    def until(self, holds: Callable[[], object], within_s: float) -> None:
        """Wait until a condition holds, testing it whenever tokens come. Raises the error of a
        failed request.

        within_s: seconds after which waiting fails.
        """
        with self._changed:
            held = self._changed.wait_for(lambda: holds() or self._error, within_s)
            if self._error is not None:
                raise self._error
            assert held, f"no answer within {within_s:g} s"

    def first_token_s(self, ref: AdapterRef, found: Residency) -> float:
        """Return the seconds until a request with this adapter has its one token.

        Raises AssertionError if the adapter's tier was not `found`.
        """
        request, began_s = self._request(ref, 1), time.perf_counter()
        taken = self.host.submit(request)
        self.until(lambda: self.came_s[request.request_id], _WITHIN_S)
        assert taken.result() is found, f"{ref} was found on {taken.result()}: want {found}"
        return self.came_s[request.request_id][0] - began_s

    @contextmanager
    def streams(self, refs: Iterator[AdapterRef], count: int) -> Iterator[list[str]]:
        """Run `count` sequences that decode inside the block; yield their ids.

        refs: adapters of the sequences, one each.
        """
        requests = [self._request(next(refs), _STREAM_TOKENS) for _ in range(count)]
        ids = [request.request_id for request in requests]
        for request in requests:
            self.host.submit(request)
        self.until(lambda: all(len(self.came_s[i]) >= _WARM_TOKENS for i in ids), _WITHIN_S)
        yield ids
        self.until(lambda: True, _WITHIN_S)  # raises the error of a failed request
        assert self.ended.isdisjoint(ids), f"streams ended after {_STREAM_TOKENS} tokens"
        for request_id in ids:
            self.host.abort(request_id)
        while self.host.status.live.running:
            time.sleep(0.01)

    def gaps_ms(self, ids: Sequence[str], begin_s: float, end_s: float) -> list[float]:
        """Return the milliseconds between tokens of each stream, of tokens that came from begin_s
        to end_s.
        """
        within = ([t for t in self.came_s[i] if begin_s <= t <= end_s] for i in ids)
        return [1e3 * (after - before) for times_s in within for before, after in pairwise(times_s)]

    def load(
        self,
        refs: Iterator[AdapterRef],
        found: Residency,
        until_s: float,
        per_s: float = LOADS_PER_S,
    ) -> AdapterRef:
        """Prefetch adapters at a steady rate until `until_s`; return the last adapter.

        found: tier in which each adapter must lie.
        per_s: adapters per second.
        Raises AssertionError if an adapter's tier was not `found`.
        """
        due_s = time.perf_counter()
        while due_s < until_s:
            time.sleep(max(0.0, due_s - time.perf_counter()))
            ref = self.prefetch(next(refs), found)
            due_s += 1 / per_s
        return ref

    def prefetch(self, ref: AdapterRef, found: Residency) -> AdapterRef:
        """Prefetch an adapter to the GPU, and return it. Raises AssertionError if its tier was not
        `found`.
        """
        was = self.host.residency(ref).result()
        assert was is found, f"{ref} was found on {was}: want {found}"
        self.host.prefetch(ref, uses=1.0)  # above all adapters used earlier
        return ref

    def arrival_of(self, ref: AdapterRef) -> None:
        """Wait until the adapter is on the GPU."""
        end_s = time.perf_counter() + _WITHIN_S
        while self.host.residency(ref).result() is not Residency.GPU:
            assert time.perf_counter() < end_s, f"{ref} was not loaded"
            time.sleep(0.001)

    def _request(self, ref: AdapterRef, tokens: int) -> Request:
        prompt = self._random.integers(0, self.host.info.vocab_size, _PROMPT).tolist()
        salt = secrets.token_hex(8)  # the prefix cache holds nothing of this prompt
        return request_of(str(next(self._numbers)), prompt, tokens, ref, salt)

    def _deliver(self, outputs: list[Output]) -> None:
        now_s = time.perf_counter()
        with self._changed:
            for output in outputs:
                if isinstance(output, Failed):
                    self._error = output.error
                    continue
                self.came_s[output.request_id] += [now_s] * len(output.token_ids)
                if output.finish is not None:
                    self.ended.add(output.request_id)
            self._changed.notify_all()

    def _fail(self, error: EngineClosed) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()


def first_tokens(client: Client, adapters: Adapters, streams: int) -> list[FirstToken]:
    """Send requests one after another, with adapters of each tier in turn; print the rows.

    streams: number of sequences that decode meanwhile.
    """
    took_ms: dict[Residency, list[float]] = {tier: [] for tier in adapters}
    for begun in range(0, ROUNDS, AT_A_TIME):
        with client.streams(adapters[Residency.GPU], streams):
            for _, tier in itertools.product(range(min(AT_A_TIME, ROUNDS - begun)), adapters):
                time.sleep(_PAUSE_S)
                took_ms[tier].append(1e3 * client.first_token_s(next(adapters[tier]), tier))
    warm = _percentiles(took_ms[Residency.GPU])
    return harness.show(
        _first_token(streams, tier, _percentiles(took_ms[tier]), warm) for tier in adapters
    )


def gaps(
    client: Client, adapters: Adapters, streams: int, per_s: float = LOADS_PER_S
) -> list[Gaps]:
    """Measure gaps of streams without loads and beside loads from each tier, in turns; print the
    rows.

    streams: number of decoding sequences.
    per_s: loads per second.
    """
    sources = (None, *(tier for tier in adapters if tier is not Residency.GPU))
    phases: dict[Residency | None, list[list[float]]] = {source: [] for source in sources}
    behind_s = dict.fromkeys(sources, 0.0)
    for _, source in itertools.product(range(PHASES), sources):
        with client.streams(adapters[Residency.GPU], streams) as ids:
            begin_s = time.perf_counter()
            end_s = begin_s + PHASE_S
            last = client.load(adapters[source], source, end_s, per_s) if source else None
            time.sleep(max(0.0, end_s - time.perf_counter()))
            phases[source].append(client.gaps_ms(ids, begin_s, end_s))
            if last:
                client.arrival_of(last)
                behind_s[source] = max(behind_s[source], time.perf_counter() - end_s)
    alone = _percentiles(np.concatenate(phases[None]))
    return harness.show(
        _gaps(source, phases[source], alone, behind_s[source]) for source in sources
    )


def loads(client: Client, adapters: Adapters, streams: int, gpu_bytes: int) -> Iterator[Load]:
    """Time loads from the host, one after another.

    streams: number of sequences that decode meanwhile.
    gpu_bytes: bytes of an image on each GPU.
    """
    took_ms = []
    with client.streams(adapters[Residency.GPU], streams):
        for _ in range(LOADS):
            time.sleep(_PAUSE_S)
            began_s = time.perf_counter()
            client.arrival_of(client.prefetch(next(adapters[Residency.HOST]), Residency.HOST))
            took_ms.append(1e3 * (time.perf_counter() - began_s))
    ready_ms = _percentiles(took_ms)
    yield Load(streams, gpu_bytes, ready_ms, gpu_bytes / ready_ms[0] / 1e6)


def main() -> None:
    """Measure all parts on one engine; write each part as it is measured."""
    options = _arguments()
    known = harness.facts(options.commit) | harness.about(options) | {"rank": options.rank}
    model = harness.model_of(options) | {"rank": options.rank}
    image = image_bytes(**model)
    with tempfile.TemporaryDirectory() as name:
        folder, counts = Path(name), counts_of(image)
        blobs = write_random_blobs(folder / "blobs", counts, model["config"], options.rank)
        build = partial(tiered_engine, folder, blobs, counts, **model)
        found = counts.refs(blobs).items()
        adapters = {tier: itertools.cycle(refs) for tier, refs in found if refs}
        with Client(build) as client:
            _measure(client, adapters, options, image, known)


def _measure(
    client: Client,
    adapters: Adapters,
    options: argparse.Namespace,
    image: int,
    known: dict[str, Any],
) -> None:
    parts: dict[str, list[Any]] = {"first_tokens": [], "loads": []}
    gpu_bytes = image // options.tensor_parallel
    for streams in (0, options.streams):
        parts["first_tokens"] += first_tokens(client, adapters, streams)
        parts["loads"] += harness.show(loads(client, adapters, streams, gpu_bytes))
        harness.write(options.json, known, **parts)
    per_s = min(LOADS_PER_S, LOADED_BYTES_PER_S / image)
    parts["gaps"] = gaps(client, adapters, options.streams, per_s)
    harness.write(options.json, known, **parts, loads_per_s=per_s)


def _arguments() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    harness.add_model_arguments(parser)
    parser.add_argument("--rank", type=int, default=RANK, help="rank of all adapters")
    parser.add_argument(
        "--streams", type=int, default=STREAMS, help="sequences that decode meanwhile"
    )
    return parser.parse_args()


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


def _percentiles(ms: Sequence[float] | NDArray[np.float64]) -> list[float]:
    return harness.percentiles(ms, 50, 99)


if __name__ == "__main__":
    main()
