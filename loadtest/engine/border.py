"""Traffic that swings between many adapters and long prompts, with fixed and with a moving border.

python -m loadtest.engine.border --json border.json [--config llama-3.1-8b] [--seconds 30]

Two kinds of traffic share one size of GPU memory by turns: many adapters with short prompts, and
few adapters behind many long prefixes. Three engines serve the same requests, one after another:
one with a fixed border that suits the adapters, one with a fixed border that suits the prefixes,
and one with a moving border. Prints a row for each phase of each engine.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter

import numpy as np

from loadtest.engine import harness
from loadtest.engine.offline import request_of
from loadtest.engine.random_adapters import random_refs
from loadtest.engine.tiered_engine import image_bytes
from lorikeet_engine.adapter import Residency
from lorikeet_engine.engine import Engine
from lorikeet_engine.request import Failed, Request

IN_FLIGHT, GOAL_S = 48, 1.0
"""Requests that are always in flight, and the time to the first token within which one is good."""
_SHARED_BYTES = 24 << 30
_LEAST_ADAPTERS = 32


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one kind, drawn evenly over adapters and prefixes.

    prefixes: number of distinct beginnings of prompts; 0: all prompts differ.
    prefix_tokens: tokens of a beginning.
    """

    name: str
    adapters: int
    prompt_tokens: int
    output_tokens: int
    prefixes: int = 0
    prefix_tokens: int = 0


MANY = Traffic("many adapters", adapters=192, prompt_tokens=64, output_tokens=16)
LONG = Traffic("long prefixes", 8, 32, 16, prefixes=36, prefix_tokens=4096)


@dataclass(frozen=True, slots=True)
class Row:
    """A phase of one engine.

    good_per_s: requests per second whose first token came within GOAL_S.
    first_p50_ms, first_p99_ms: times to the first token.
    gap_p99_ms: times between two tokens of a request.
    arena_gib: the adapters' memory at the phase's end.
    moves: units of memory that have moved in the phase.
    """

    border: str
    traffic: str
    good_per_s: float
    first_p50_ms: float
    first_p99_ms: float
    gap_p99_ms: float
    arena_gib: float
    moves: int


class Client:
    """Keeps IN_FLIGHT requests in flight on an engine that it steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._rng = engine, np.random.default_rng(1)
        self._salt, self._names = secrets.token_hex(4), count()

    def run(self, traffic: Traffic, seconds: float) -> tuple[list[float], list[float]]:
        """Serve one kind of traffic for so many seconds; return the times to the first token and
        the gaps between tokens, in seconds.
        """
        firsts, gaps, last = list[float](), list[float](), dict[str, float]()
        begun, left = dict[str, float](), dict[str, int]()
        end_s = perf_counter() + seconds
        while perf_counter() < end_s or left:
            while len(left) < IN_FLIGHT and perf_counter() < end_s:
                request = self._draw(traffic)
                begun[request.request_id] = perf_counter()
                left[request.request_id] = traffic.output_tokens
                self._engine.submit(request)
            self._engine.wait(1.0)
            outputs, now_s = self._engine.step(), perf_counter()
            for output in outputs:
                if isinstance(output, Failed):
                    raise output.error
                name = output.request_id
                if name in last:
                    gaps.append(now_s - last[name])
                else:
                    firsts.append(now_s - begun[name])
                last[name] = now_s
                left[name] -= len(output.token_ids)
                if not left[name]:
                    del left[name], last[name]
        return firsts, gaps

    def _draw(self, traffic: Traffic) -> Request:
        vocab, rng = self._engine.info.vocab_size, self._rng
        tokens = rng.integers(0, vocab, traffic.prompt_tokens).tolist()
        ref = random_refs(traffic.adapters)[int(rng.integers(traffic.adapters))]
        if traffic.prefixes:
            which = int(rng.integers(traffic.prefixes))
            ref = random_refs(traffic.adapters)[which % traffic.adapters]
            drawn = np.random.default_rng(which).integers(0, vocab, traffic.prefix_tokens)
            tokens = [*drawn.tolist(), *tokens]
        name = f"{traffic.name} {next(self._names)}"
        return request_of(name, tokens, traffic.output_tokens, ref, self._salt)


def phases(
    engine: Engine, border: str, traffics: tuple[Traffic, ...], seconds: float
) -> Iterator[Row]:
    """Serve kinds of traffic one after another, each for so many seconds; yield a row for each."""
    client = Client(engine)
    for traffic in traffics:
        before = _moves(engine)
        firsts, gaps = client.run(traffic, seconds)
        p50_ms, p99_ms = harness.percentiles([1e3 * each for each in firsts], 50, 99)
        (gap_ms,) = harness.percentiles([1e3 * each for each in gaps], 99)
        good = sum(each <= GOAL_S for each in firsts) / seconds
        arena = engine.status().tiers[Residency.GPU].capacity_bytes / 2**30
        yield Row(
            border,
            traffic.name,
            round(good, 2),
            p50_ms,
            p99_ms,
            gap_ms,
            round(arena, 2),
            _moves(engine) - before,
        )


def main() -> None:
    """Measure all rows on three engines."""
    parser = harness.arguments(__doc__)
    harness.add_model_arguments(parser)
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of a phase")
    parser.add_argument("--turns", type=int, default=2, help="times that each kind comes")
    parser.add_argument(
        "--shared-bytes", type=int, default=_SHARED_BYTES, help="bytes of adapters and KV pages"
    )
    options = parser.parse_args()
    facts, model = harness.facts(options.commit), harness.model_of(options)
    adapters = MANY.adapters + 4
    rows = list[Row]()
    for border, room, moving in (
        ("for adapters", adapters, False),
        ("for prefixes", _LEAST_ADAPTERS, False),
        ("moving", _LEAST_ADAPTERS, True),
    ):
        image = image_bytes(model["config"], model["settings"])
        kv_bytes = options.shared_bytes - room * image
        more = {"kv_bytes": kv_bytes, "moving_border": moving, "max_context": 8192}
        more |= {"max_batch_adapters": _LEAST_ADAPTERS}  # the most that each engine has room for
        settings = replace(model["settings"], **more)
        arguments = {"adapters": adapters, "room": room, "settings": settings}
        with harness.full_engine(config=model["config"], **arguments) as engine:
            traffics = (MANY, LONG) * options.turns
            rows += harness.show(phases(engine, border, traffics, options.seconds))
        harness.empty_device()
    harness.write(options.json, facts, **harness.about(options), border=rows)


def _moves(engine: Engine) -> int:
    border = engine.status().border
    return 0 if border is None else border.to_adapters + border.to_pages


if __name__ == "__main__":
    main()
