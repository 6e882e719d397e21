"""Offline work: many requests submitted at once to an engine that is stepped by hand."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from loadtest.engine.plain import Answer
from loadtest.engine.random_adapters import Targets, random_refs
from lorikeet.simulator.workload_models import Distinct, Popularity
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.engine import Engine
from lorikeet_engine.request import Failed, Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
_DEALT_ROUND = Distinct()


@dataclass(frozen=True, slots=True)
class Work:
    """Set of requests that are submitted to an engine at once.

    adapters: number of distinct adapters; 0: the base model.
    requests: number of requests.
    popularity: distribution of the requests over the adapters.
    cold: whether no adapter is on the GPU at the start; else the adapters of the previous run are.
    sampling: sampling parameters; `output_tokens` sets the number of tokens.
    on: linears that the adapters change.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    adapters: int = 0
    requests: int = 256
    popularity: Popularity = _DEALT_ROUND
    cold: bool = False
    sampling: SamplingParams = GREEDY
    on: Targets = Targets.LINEARS

    @property
    def label(self) -> str:
        """Name with lengths, as in 'base 256/128'."""
        return f"{self.name} {self.prompt_tokens}/{self.output_tokens}"

    def draw(self, vocab: int, run: int) -> list[Request]:
        """Draw requests with random prompts; the prefix cache holds nothing of earlier draws.

        run: number of the draw.
        """
        rng = np.random.default_rng([*self.label.encode(), run])
        prompts = rng.integers(0, vocab, (self.requests, self.prompt_tokens)).tolist()
        salt = secrets.token_hex(8)
        chosen: list[AdapterRef | None] = [None] * self.requests
        if self.adapters:
            refs = random_refs(self.adapters, self.on)
            chosen = [refs[i] for i in self.popularity.draw(rng, self.adapters, self.requests)]
        return [
            request_of(
                f"{self.label} {run}.{i}", prompt, self.output_tokens, adapter, salt, self.sampling
            )
            for i, (prompt, adapter) in enumerate(zip(prompts, chosen, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """Answers and times of requests that ran.

    began_s: time of the first submission.
    ticks_s: times at which each step's tokens arrived.
    """

    answers: list[Answer]
    began_s: float
    ticks_s: list[float]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of the whole run, prefill included."""
        return sum(len(a.tokens) for a in self.answers) / (self.ticks_s[-1] - self.began_s)

    def steps_ms(self) -> list[float]:
        """Return the times between the tokens of consecutive steps.

        A step's tokens may be read while the next step runs, so the duration of Engine.step says
        little; in a steady state the time from tokens to tokens is one step, however deep steps
        overlap.
        """
        return [1e3 * (end - begin) for begin, end in pairwise(self.ticks_s)]


def request_of(
    name: str,
    prompt: Sequence[int],
    tokens: int,
    adapter: AdapterRef | None,
    salt: str,
    sampling: SamplingParams = GREEDY,
) -> Request:
    """Make a request for exactly `tokens` tokens.

    name: id of the request.
    salt: only requests with equal salts share cached prefixes.
    sampling: sampling parameters, except the number of tokens.
    """
    sampling = replace(sampling, max_tokens=tokens, ignore_eos=True)
    return Request(name, (tuple(prompt),), sampling, 1, adapter, salt)


def generate(engine: Engine, requests: list[Request]) -> Run:
    """Submit all requests and step until all are answered. Raises the error of a failed request."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ticks_s: list[float] = []
    began_s = time.perf_counter()
    for request in requests:
        engine.submit(request)
    left = len(requests)
    while left:
        engine.wait(1.0)
        outputs = engine.step()
        if outputs:
            ticks_s.append(time.perf_counter())
        for output in outputs:
            if isinstance(output, Failed):
                raise output.error
            tokens[output.request_id] += output.token_ids
            left -= output.finish is not None
    answers = [Answer(request, tokens[request.request_id]) for request in requests]
    return Run(answers, began_s, ticks_s)


def begin(engine: Engine, requests: list[Request]) -> None:
    """Step until each of the submitted requests has its first token; after that, only decode steps
    follow.
    """
    begun: set[str] = set()
    while len(begun) < len(requests):
        engine.wait(1.0)
        begun |= {output.request_id for output in engine.step()}


def steps_ms(engine: Engine, count: int) -> list[float]:
    """Take `count` decode steps; return the times between the tokens of consecutive steps."""
    ticks_s = []
    for _ in range(count):
        assert engine.step(), "a step of decodes without tokens"
        ticks_s.append(time.perf_counter())
    return [1e3 * (end - begin) for begin, end in pairwise(ticks_s)]


def abort(engine: Engine, requests: list[Request]) -> None:
    """Abort requests that are in flight."""
    for request in requests:
        engine.abort(request.request_id)
    engine.step()
