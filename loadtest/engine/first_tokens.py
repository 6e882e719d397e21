"""First tokens of a lone request: with and without a cached prefix, and behind a long context.

python -m loadtest.engine.first_tokens --json first_tokens.json [--config qwen3.5-9b]
    [--long 131072]

Times from submission to first token: a prompt of 4,096 tokens and 16 more that is not cached and
one whose 4,096 tokens are; a prompt of 8,192 tokens that the base model has computed and an
invocation of 8 tokens, as an activated LoRA and as a plain adapter; a prompt of --long tokens. Then
times a decode step of one request behind 256 tokens and behind --long tokens. Prints a row for
each.
"""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from loadtest.engine import harness, plain
from loadtest.engine.offline import abort, begin, generate, request_of, steps_ms
from loadtest.engine.random_adapters import random_refs
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.engine import Engine

CACHED, BASE, SHORT = 4096, 8192, 256
"""Tokens of the cached prefix, of the prompt that the base model has computed, and of the prompt
that steps are timed behind."""
TURNS = 7
STEPS = 50
_INVOCATION = tuple(range(100, 108))


@dataclass(frozen=True, slots=True)
class Row:
    """Times of one kind of request.

    ms: median of all turns, in milliseconds.
    turns_ms: milliseconds of the first seven turns.
    """

    name: str
    ms: float
    turns_ms: list[float]


class Prompts:
    """Asks an engine for first tokens, one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(1)

    def draw(self, tokens: int) -> list[int]:
        """Return a random prompt without the tokens of the invocation."""
        low, high = max(_INVOCATION) + 1, self._engine.info.vocab_size
        return self._rng.integers(low, high, tokens).tolist()

    def ask(self, prompt: list[int], salt: str, adapter: AdapterRef | None = None) -> float:
        """Return the milliseconds to the first token of a prompt."""
        request = request_of(secrets.token_hex(4), prompt, 1, adapter, salt)
        began_s = time.perf_counter()
        generate(self._engine, [request])
        return 1e3 * (time.perf_counter() - began_s)

    def step(self, tokens: int) -> list[float]:
        """Return the milliseconds of decode steps of one request behind a prompt."""
        request = request_of("step", self.draw(tokens), 2 * STEPS, None, secrets.token_hex(4))
        self._engine.submit(request)
        begin(self._engine, [request])
        times_ms = steps_ms(self._engine, STEPS)
        abort(self._engine, [request])
        return times_ms


def measure(engine: Engine, long: int) -> Iterator[Row]:
    """Check the first tokens of a cached prompt, then yield a row for each kind of request.

    long: tokens of the longest prompt.

    Raises AssertionError if the engine's tokens are wrong.
    """
    prompts = Prompts(engine)
    _check(engine, prompts)
    plain_ref, other = random_refs(2)
    activated = replace(other, invocation_tokens=_INVOCATION)
    misses, hits, as_plain, as_activated = (list[float]() for _ in range(4))
    for _ in range(TURNS + 1):
        salt, prefix = secrets.token_hex(4), prompts.draw(CACHED)
        misses.append(prompts.ask(prefix + prompts.draw(16), salt))
        hits.append(prompts.ask(prefix + prompts.draw(16), salt))
        prefix = prompts.draw(BASE)
        prompts.ask(prefix, salt)
        check = [*prefix, *_INVOCATION]
        as_plain.append(prompts.ask(check, salt, plain_ref))
        as_activated.append(prompts.ask(check, salt, activated))
    yield _row(f"{CACHED:,} and 16 tokens, not cached", misses)
    yield _row(f"{CACHED:,} tokens cached, 16 more", hits)
    yield _row(f"{BASE:,} and an invocation, plain adapter", as_plain)
    yield _row(f"{BASE:,} of the base's and an invocation, activated", as_activated)
    yield _row(f"a step behind {SHORT:,} tokens", prompts.step(SHORT))
    if long:
        alone = [prompts.ask(prompts.draw(long), secrets.token_hex(4)) for _ in range(3)]
        yield _row(f"{long:,} tokens", alone)
        yield _row(f"a step behind {long:,} tokens", prompts.step(long))


def main() -> None:
    """Measure all rows on one engine."""
    parser = harness.arguments(__doc__)
    harness.add_model_arguments(parser)
    parser.add_argument("--long", type=int, default=131072, help="tokens of the longest prompt")
    options = parser.parse_args()
    facts = harness.facts(options.commit)
    model = harness.model_of(options)
    context = max(options.long, BASE) + 1024
    settings = replace(model["settings"], max_context=context, max_batch_adapters=2)
    model["settings"] = settings
    with harness.full_engine(adapters=2, room=2, **model) as engine:
        rows = harness.show(measure(engine, options.long))
    harness.write(options.json, facts, **harness.about(options), first_tokens=rows)


def _check(engine: Engine, prompts: Prompts) -> None:
    """Raise AssertionError if the tokens behind a cached prefix are wrong."""
    salt, prefix = secrets.token_hex(4), prompts.draw(CACHED)
    prompts.ask(prefix, salt)
    request = request_of("check", [*prefix, *prompts.draw(16)], 8, None, salt)
    plain.check(engine, generate(engine, [request]).answers)


def _row(name: str, times_ms: list[float]) -> Row:
    """Make a row of times. Leaves out the first time, which may include compiling kernels."""
    return Row(name, median(times_ms[1:]), [round(each, 2) for each in times_ms[1:8]])


if __name__ == "__main__":
    main()
