"""Does streaming slow the engine's steps, and do steps slow streaming?

python -m engine.benchmarks.streaming --json results.json

A model that sleeps 10 ms a step without the interpreter lock stands for a GPU; the rest of the
engine is the real one. So is what makes its tokens into the bytes of 256 streams, an answer for
each. `bytes, sent` is a replica that gives Serve each chunk by itself, which costs the same event
loop 65 us a chunk (measured with Ray 2.60); busy work stands for that. The engine steps in a thread
beside all this, in a thread with a shorter switch interval, and in a process of its own.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engine.benchmarks.results import arguments, facts, write
from engine.benchmarks.sleeping_engine import sleeping_engine
from lorikeet.api.messages import Call, Endpoint
from lorikeet.serving.answer import Answer
from lorikeet.serving.vocabulary import Vocabulary
from lorikeet_engine.engine import Engine
from lorikeet_engine.host import EngineHost
from lorikeet_engine.loop import EngineLoop
from lorikeet_engine.request import Output, Request, SamplingParams

STEP_S = 0.010
STREAMS = 256
TOKENS = 256
ROUNDS = 3  # of each row the median by tokens/s is told
PROMPT = (5, 6, 7)
SEND_S = 65e-6
TOKENIZER = Path("demo/model/tokenizer.json")

Build = Callable[[], Engine]
Deliver = Callable[[list[Output]], None]


class ThreadedEngine:
    """An engine in a thread of this process."""

    def __init__(self, build: Build, deliver: Deliver) -> None:
        self._engine = build()
        self.submit = self._engine.submit
        self._loop = EngineLoop(self._engine, deliver, step_timeout_s=60)
        self._loop.start()

    def close(self) -> None:
        """Stop it."""
        self._loop.close()


def _hosted(build: Build, deliver: Deliver) -> EngineHost:
    return EngineHost(build, deliver, ended=lambda _error: None, news=lambda _news: None)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the engine steps. switch_s: the interpreter's switch interval."""

    name: str
    start: Callable[[Build, Deliver], Any]
    switch_s: float = 0.005


PLACES = (
    Place("thread", ThreadedEngine),
    Place("thread, 0.5 ms", ThreadedEngine, 0.0005),
    Place("thread, 0.05 ms", ThreadedEngine, 0.00005),
    Place("process", _hosted),
)


class Load(Enum):
    """What is done with the tokens."""

    NONE = "nothing"
    BYTES = "bytes"
    SENT = "bytes, sent"


@dataclass(frozen=True, slots=True)
class Row:
    """One run. step_ms, delay_ms: median and 99th percentile.

    A step lasts from the end of the one before to its own; the delay is from the end of a step to
    the bytes of each of its streams.
    """

    place: str
    load: str
    step_ms: tuple[float, float]
    tokens_per_s: float
    delay_ms: tuple[float, float] | None


def measure(place: Place, load: Load, folder: Path) -> Row:
    """Run 256 requests to their end."""
    times = folder / "times.json"
    build = partial(sleeping_engine, folder, times, STEP_S)
    turns = _turns(SEND_S) if load is Load.SENT else 0
    sys.setswitchinterval(place.switch_s)
    bytes_s = asyncio.run(_run(partial(place.start, build), load, turns))
    sys.setswitchinterval(0.005)
    ended_s: dict[str, list[float]] = json.loads(times.read_text())
    assert all(len(ends) == TOKENS for ends in ended_s.values())
    # The first and last tenth are left out: streams begin and end there.
    ends = np.unique([ends[TOKENS // 10 : -TOKENS // 10] for ends in ended_s.values()])
    steps = [later - earlier for earlier, later in pairwise(ends)]
    delays = [
        seen - ended
        for name, seen_s in bytes_s.items()
        for seen, ended in zip(seen_s[1:-1], ended_s[name][1:-1], strict=True)
    ]
    return Row(
        place.name,
        load.value,
        _percentiles(steps),
        STREAMS * len(steps) / sum(steps),
        _percentiles(delays) if delays else None,
    )


async def _run(start: Callable[[Deliver], Any], load: Load, turns: int) -> dict[str, list[float]]:
    """When the bytes of each token of each request were there."""
    event_loop = asyncio.get_running_loop()
    mailboxes = {f"{i:032x}": asyncio.Queue[Output]() for i in range(STREAMS)}
    left, all_ended = STREAMS, asyncio.Event()

    def sort(outputs: list[Output]) -> None:
        for output in outputs:
            mailboxes[output.request_id].put_nowait(output)

    def drop(outputs: list[Output]) -> None:
        nonlocal left
        left -= sum(output.finish is not None for output in outputs)
        if not left:
            event_loop.call_soon_threadsafe(all_ended.set)

    def deliver(outputs: list[Output]) -> None:
        event_loop.call_soon_threadsafe(sort, outputs)

    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with closing(start(drop if load is Load.NONE else deliver)) as engine:
        for name in mailboxes:
            engine.submit(Request(name, (PROMPT,), sampling))
        if load is Load.NONE:
            await all_ended.wait()
            return {}
        vocabulary = Vocabulary(Tokenizer.from_file(str(TOKENIZER)))
        seen = await asyncio.gather(
            *(_stream(n, m, vocabulary, turns) for n, m in mailboxes.items())
        )
    return dict(zip(mailboxes, seen, strict=True))


async def _stream(
    name: str, mailbox: asyncio.Queue[Output], vocabulary: Vocabulary, turns: int
) -> list[float]:
    call = Call(name, Endpoint.CHAT, 0, "acme", "acme/support", None, stream=True)
    answer = Answer(call, [PROMPT], vocabulary)
    seen_s: list[float] = []
    sent = 0
    while not answer.finished:
        outputs = [await mailbox.get()]
        while not mailbox.empty():
            outputs.append(mailbox.get_nowait())
        for item in answer.take(outputs):
            sent += len(item)
            _work(turns)
        seen_s += [time.monotonic()] * len(outputs)
    assert sent > 50 * TOKENS
    return seen_s


def _work(turns: int) -> None:
    for _ in range(turns):
        pass


def _turns(seconds: float) -> int:
    """How many turns of _work take so long on an idle machine."""
    turns = 1_000_000
    began_s = time.perf_counter()
    _work(turns)
    return round(turns * seconds / (time.perf_counter() - began_s))


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    middle, high = np.percentile(seconds, [50, 99]) * 1e3
    return round(float(middle), 2), round(float(high), 2)


def main() -> None:
    """Measure every place, alone and with streams."""
    options = arguments(__doc__).parse_args()
    known = facts(options.commit) | {"cores": str(os.cpu_count())}
    print(f"{os.cpu_count()} cores, {STREAMS} streams, steps of {STEP_S * 1e3:.0f} ms")
    print("engine in a        streams      step p50      p99    tok/s delay p50      p99")
    with tempfile.TemporaryDirectory() as folder:
        rounds = [
            [measure(place, load, Path(folder)) for place in PLACES for load in Load]
            for _ in range(ROUNDS)
        ]
    rows = [
        sorted(same, key=lambda row: row.tokens_per_s)[ROUNDS // 2]
        for same in zip(*rounds, strict=True)
    ]
    for row in rows:
        steps = "".join(f"{ms:>9.2f}" for ms in row.step_ms)
        delays = "".join(f"{ms:>9.2f}" for ms in row.delay_ms or ())
        print(f"{row.place:<19}{row.load:<12}{steps}{row.tokens_per_s:>9.0f}{delays}")
    write(options.json, known, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
