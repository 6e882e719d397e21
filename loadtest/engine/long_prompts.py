"""Long prompts beside streams: the streams' gaps, and the cost of an inter-token goal for prompts.

python -m loadtest.engine.long_prompts --json long_prompts.json [--kv-dtype fp8]

64 streams decode on Llama-3.1-8B's shapes while prompts of 100,000 tokens come one after another,
without a goal and with one of 40 ms; then while 64 prompts of 32,000 tokens come at once. Another
thread submits the prompts, as in a replica. Then 3 prompts of 100,000 tokens come at once, without
and with short prompts of the same tenant. Tokens are compared with a plain forward pass before
anything is timed. Prints a row for each work and goal.
"""

import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from loadtest.engine import harness
from loadtest.engine.offline import Work, request_of
from loadtest.engine.random_engine import SETTINGS as USUAL
from lorikeet_engine.device.memory import MemoryShare
from lorikeet_engine.engine import Engine
from lorikeet_engine.request import Failed, Request
from lorikeet_engine.scheduling.step_budget import StepBudget

GOAL_S = 0.04
# The product's defaults: whole contexts, and all the KV pages that fit.
SETTINGS = replace(
    USUAL,
    max_context=None,
    max_batch_tokens=2048,
    kv_bytes=MemoryShare(0.9),
    inter_token_goal_s=GOAL_S,
)
ADAPTERS = 32  # with room for adapters, the cost of ranks is measured too
CHECKED = Work("base", 256, 8, requests=8)
_SHORT, _EVERY_S = 20, 0.25  # tokens of a short prompt, and seconds between two of them
_WARM_TOKENS = 8  # tokens of each stream before prompts come


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """Long prompts that come beside decoding streams, one after another or all at once.

    seconds: maximum seconds to wait for the prompts.
    """

    name: str
    prompts: int
    prompt_tokens: int
    at_once: bool = False
    seconds: float = 90.0
    streams: int = 64
    stream_prompt: int = 512
    stream_tokens: int = 8192

    @property
    def label(self) -> str:
        """Name of these prompts with their numbers, for the table."""
        return f"{self.prompts} × {self.prompt_tokens:,} {self.name}"


WORKS = (
    LongPrompts("one by one", 3, 100_000),
    LongPrompts("at once", 64, 32_000, at_once=True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Gaps of the streams and rate of the prompts.

    goal_ms: inter-token goal; None without a goal.
    gaps_ms: gaps between tokens of a stream: p50, p99 and the longest.
    over_step_ms: longest time by which a gap exceeded the step it waited for.
    done: prompts that got their token.
    prompt_tokens_per_s: rate of the done prompts.
    of_no_goal: prompt_tokens_per_s as a share of the rate without a goal.
    """

    work: LongPrompts
    goal_ms: float | None
    gaps_ms: list[float]
    over_step_ms: float
    done: int
    prompt_tokens_per_s: float
    of_no_goal: float | None = None


@dataclass(frozen=True, slots=True)
class ShortRow:
    """Short prompts behind long ones of their tenant.

    short: number of short prompts.
    first_token_ms: time to a short prompt's first token: p50, p99 and the longest.
    long_tokens_per_s: rate of the long prompts.
    """

    short: int
    first_token_ms: list[float]
    long_tokens_per_s: float


class Streams:
    """Decoding streams of an engine, and the times between their tokens."""

    def __init__(self, engine: Engine, ids: Iterable[str]) -> None:
        self._engine = engine
        self._last_s = dict[str, float | None].fromkeys(ids)
        self.gaps_s, self.over_s = list[float](), list[float]()

    @property
    def begun(self) -> bool:
        """Whether all streams have made their first tokens."""
        enough = len(self.gaps_s) >= _WARM_TOKENS * len(self._last_s)
        return enough and None not in self._last_s.values()

    def step(self) -> set[str]:
        """Take one step; return the ids of ended prompts. Raises the error of a failed request."""
        steps_s = self._engine._counters.seconds
        before_s = steps_s.read().total
        self._engine.wait(1.0)
        outputs = self._engine.step()
        now_s, step_s = time.perf_counter(), steps_s.read().total - before_s
        ended = set[str]()
        for output in outputs:
            if isinstance(output, Failed):
                raise output.error
            if output.request_id in self._last_s:
                assert output.finish is None, "a stream ended too early"
                last_s = self._last_s[output.request_id]
                self._last_s[output.request_id] = now_s
                if last_s is not None:
                    self.gaps_s.append(now_s - last_s)
                    self.over_s.append(now_s - last_s - step_s)
            elif output.finish is not None:
                ended.add(output.request_id)
        return ended


def measure(engine: Engine, work: LongPrompts, goal_s: float | None) -> Row:
    """Time the work under an inter-token goal, which replaces the engine's own.

    goal_s: the goal in seconds; None: no goal.
    """
    _set_goal(engine, goal_s)
    requests = _requests(engine, work.prompts, work.prompt_tokens, 1)
    with _streams(engine, work) as streams, ThreadPoolExecutor(1) as submitting:
        began_s = done_s = time.perf_counter()
        first = requests if work.at_once else requests[:1]
        pending = [submitting.submit(engine.submit, request) for request in first]
        waiting, done = requests[len(first) :], 0
        while done < work.prompts and time.perf_counter() - began_s < work.seconds:
            if ended := streams.step():
                done, done_s = done + len(ended), time.perf_counter()
                if waiting:
                    pending.append(submitting.submit(engine.submit, waiting.pop(0)))
        for future in pending:
            future.result()  # raises the error of a submission
        for request in requests:
            engine.abort(request.request_id)
    rate = done * work.prompt_tokens / (done_s - began_s) if done else 0.0
    gaps_ms = 1e3 * np.array(streams.gaps_s)
    return Row(
        work,
        None if goal_s is None else 1e3 * goal_s,
        harness.percentiles(gaps_ms, 50, 99, 100),
        1e3 * max(streams.over_s),
        done,
        rate,
    )


def measure_short(engine: Engine, count: int, long_tokens: int, *, short: bool) -> ShortRow:
    """Time `count` long prompts that come at once, and short prompts that come until they end.

    long_tokens: tokens of a long prompt.
    short: whether short prompts come.
    """
    _set_goal(engine, None)
    longs, shorts = _requests(engine, count, long_tokens, 1), _requests(engine, 1024, _SHORT, 1)
    left, began_s = {request.request_id for request in longs}, time.perf_counter()
    for request in longs:
        engine.submit(request)
    sent_s, taken_s = dict[str, float](), list[float]()
    while left:
        now_s = time.perf_counter()
        if short and now_s >= began_s + _EVERY_S * (1 + len(sent_s)):
            sent_s[shorts[len(sent_s)].request_id] = now_s
            engine.submit(shorts[len(sent_s) - 1])
        engine.wait(1.0)
        for output in engine.step():
            if isinstance(output, Failed):
                raise output.error
            if output.request_id in sent_s:
                taken_s.append(time.perf_counter() - sent_s[output.request_id])
            left.discard(output.request_id)
    rate = count * long_tokens / (time.perf_counter() - began_s)
    while engine.status().live.running:
        engine.step()
    percentiles = harness.percentiles(1e3 * np.array(taken_s), 50, 99, 100) if taken_s else []
    return ShortRow(len(taken_s), percentiles, rate)


def measure_all(engine: Engine, works: Iterable[LongPrompts]) -> list[Row]:
    """Measure each work without and with the goal; print each row as it is measured."""
    harness.check(engine, CHECKED)
    return harness.show(_rows(engine, works))


def main() -> None:
    """Start one engine, and measure all works on it."""
    parser = harness.arguments(__doc__)
    harness.add_kv_dtype(parser)
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    settings = replace(SETTINGS, kv_dtype=options.kv_dtype)
    with harness.full_engine(adapters=ADAPTERS, room=ADAPTERS, settings=settings) as engine:
        rows = measure_all(engine, WORKS)
        each = (measure_short(engine, 3, 100_000, short=short) for short in (False, True))
        short_rows = harness.show(each)
    parts = {"long_prompts": rows, "short_prompts": short_rows}
    harness.write(options.json, facts, kv_dtype=options.kv_dtype, **parts)


def _set_goal(engine: Engine, goal_s: float | None) -> None:
    costs, sizes = engine.info.step_costs, engine._runner.prompt_sizes
    engine._step_budget = StepBudget(goal_s, costs, sizes)


def _rows(engine: Engine, works: Iterable[LongPrompts]) -> Iterator[Row]:
    for work in works:
        free = measure(engine, work, None)
        yield free
        bound = measure(engine, work, GOAL_S)
        share = bound.prompt_tokens_per_s / free.prompt_tokens_per_s if free.done else None
        yield replace(bound, of_no_goal=share)


@contextmanager
def _streams(engine: Engine, work: LongPrompts) -> Iterator[Streams]:
    """Yield decoding streams; no request runs afterwards."""
    requests = _requests(engine, work.streams, work.stream_prompt, work.stream_tokens)
    for request in requests:
        engine.submit(request)
    streams = Streams(engine, [request.request_id for request in requests])
    while not streams.begun:
        streams.step()
    streams.gaps_s.clear()
    streams.over_s.clear()
    yield streams
    for request in requests:
        engine.abort(request.request_id)
    while engine.status().live.running:
        engine.step()


def _requests(engine: Engine, count: int, prompt_tokens: int, tokens: int) -> list[Request]:
    """Make `count` requests of random prompts that share no prefix, for `tokens` tokens each."""
    rng, salt = np.random.default_rng(1), secrets.token_hex(8)
    prompts = rng.integers(0, engine.info.vocab_size, (count, prompt_tokens)).tolist()
    return [
        request_of(f"{salt} {i}", prompt, tokens, None, salt) for i, prompt in enumerate(prompts)
    ]


if __name__ == "__main__":
    main()
