"""Workload of a load test: every request with its time, model, tenant and lengths, drawn ahead.

The plan depends on its options alone: the same seed plans the same requests for any server.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorikeet.simulator.workload_models import (
    LENGTH_MODELS,
    Floats,
    GammaArrivals,
    Ints,
    TrafficTrace,
    choose_adapters,
    cut_to_context,
    parse_popularity,
    poisson,
)

DATA = Path(__file__).parent / "data"
TRACES = ("conv", "code")
# Words of one length: prompts have the wanted length with byte-level tokenizers too.
WORDS = (
    *("that", "with", "have", "this", "will", "your", "from", "they", "know", "want", "been"),
    *("good", "much", "some", "time", "very", "when", "come", "here", "just", "like", "long"),
    *("make", "many", "more", "only", "over", "such", "take", "than", "them", "well"),
)


class BadOption(ValueError):
    """An invalid option; the message names the valid values."""


@dataclass(frozen=True, slots=True)
class Target:
    """Model, and the tenants that may use it."""

    model: str
    tenants: tuple[str, ...]
    is_base: bool


@dataclass(frozen=True, slots=True)
class Planned:
    """Planned request.

    at_s: time of sending, seconds after the start.
    """

    at_s: float
    tenant: str
    model: str
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Options of a load test, as given on the command line.

    popularity: distinct, uniform, identical or zipf:<s>, over the adapters.
    arrivals: poisson, gamma:<cv>, trace:conv or trace:code.
    rate: mean requests per second; a trace is sped up or slowed down to this rate.
    lengths: conv, code, trace (with the arrivals of a trace) or fixed:<in>/<out>.
    context: maximum number of tokens of a prompt plus its answer.
    base_share: share of requests without an adapter.
    reshuffle: seconds between changes of the popularity order.
    """

    popularity: str = "zipf:1.0"
    arrivals: str = "poisson"
    rate: float = 2.0
    duration: float = 60.0
    lengths: str = "conv"
    context: int = 512
    base_share: float = 0.1
    reshuffle: float = 300.0
    seed: int = 0

    def plan(self, targets: Sequence[Target]) -> list[Planned]:
        """Draw every request, in order of time. Raises BadOption."""
        self._check(targets)
        rng = np.random.default_rng(self.seed)
        times_s, recorded = self._arrivals(rng)
        inputs, outputs = self._lengths(rng, len(times_s), recorded)
        inputs, outputs = cut_to_context(inputs, outputs, self.context)
        models = self._models(rng, times_s, targets)
        return [
            Planned(float(at_s), str(rng.choice(target.tenants)), target.model, int(i), int(o))
            for at_s, target, i, o in zip(times_s, models, inputs, outputs, strict=True)
        ]

    def _check(self, targets: Sequence[Target]) -> None:
        if not targets:
            raise BadOption("no tenant may use any model: register an adapter first")
        if self.rate <= 0 or self.duration <= 0 or self.reshuffle <= 0:
            raise BadOption("--rate, --duration and --reshuffle must be above 0")
        if self.context < 2 or not 0 <= self.base_share <= 1:
            raise BadOption("want --context ≥ 2 and --base-share between 0 and 1")

    def _arrivals(self, rng: np.random.Generator) -> tuple[Floats, TrafficTrace | None]:
        kind, _, argument = self.arrivals.partition(":")
        if kind == "trace" and argument in TRACES:
            trace = TrafficTrace.read(DATA / f"azure_llm_2023_{argument}.csv").at_rate(self.rate)
            trace = trace.until(self.duration)
            return trace.times_s, trace
        if self.arrivals == "poisson":
            return poisson(self.rate).times(rng, self.duration), None
        if kind == "gamma" and (cv := _number(argument)) > 0:
            return GammaArrivals(self.rate, cv).times(rng, self.duration), None
        raise BadOption(f"--arrivals {self.arrivals}: want poisson, gamma:<cv> or trace:conv|code")

    def _lengths(
        self, rng: np.random.Generator, requests: int, recorded: TrafficTrace | None
    ) -> tuple[Ints, Ints]:
        kind, _, argument = self.lengths.partition(":")
        if self.lengths in LENGTH_MODELS:
            return LENGTH_MODELS[self.lengths].draw(rng, requests)
        if self.lengths == "trace" and recorded is not None:
            return recorded.inputs, recorded.outputs
        tokens = [_number(part) for part in argument.split("/")]
        if kind == "fixed" and len(tokens) == 2 and min(tokens) >= 1:
            inputs, outputs = (np.full(requests, int(count)) for count in tokens)
            return inputs, outputs
        raise BadOption(
            f"--lengths {self.lengths}: want conv, code, fixed:<in>/<out>, "
            "or trace together with --arrivals trace:…"
        )

    def _models(
        self, rng: np.random.Generator, times_s: Floats, targets: Sequence[Target]
    ) -> list[Target]:
        bases = [target for target in targets if target.is_base]
        adapters = [target for target in targets if not target.is_base] or bases
        try:
            popularity = parse_popularity(self.popularity)
        except ValueError as error:
            raise BadOption(f"--popularity: {error}") from error
        chosen = choose_adapters(
            popularity, len(adapters), times_s, seed=self.seed, reshuffle_s=self.reshuffle
        )
        plain = rng.random(len(times_s)) < (self.base_share if bases else 0)
        of_base = rng.integers(max(1, len(bases)), size=len(times_s))
        return [
            bases[base] if without else adapters[adapter]
            for without, base, adapter in zip(plain, of_base, chosen, strict=True)
        ]


def targets_of(models_of_tenant: Mapping[str, Mapping[str, str | None]]) -> list[Target]:
    """Return every model once, sorted by name, with the tenants whose key lists it.

    models_of_tenant: tenant → model → base model of the adapter; None for a base model.
    """
    parents = {model: base for own in models_of_tenant.values() for model, base in own.items()}
    return [
        Target(
            model,
            tuple(tenant for tenant, own in models_of_tenant.items() if model in own),
            is_base=parents[model] is None,
        )
        for model in sorted(parents)
    ]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random prompts of wanted lengths, for a tokenizer that only the server has.

    Random words: prompts hardly share a prefix, so no prefix cache answers for the engine.

    overhead: tokens of the chat template.
    tokens_per_word: mean over the words.
    """

    overhead: float
    tokens_per_word: float

    @classmethod
    def measure(cls, prompt_tokens: Callable[[str], int]) -> "Prompts":
        """Derive overhead and tokens_per_word from two token counts: of a prompt with all words
        once, and of one with all words twice.

        prompt_tokens: returns the server's token count of a prompt.
        """
        once, twice = (prompt_tokens(" ".join(WORDS * times)) for times in (1, 2))
        tokens_per_word = max(1, twice - once) / len(WORDS)
        return cls(max(0.0, once - len(WORDS) * tokens_per_word), tokens_per_word)

    def text(self, tokens: int, rng: random.Random) -> str:
        """Draw words that make about `tokens` tokens with the template, at least one word."""
        count = max(1, int((tokens - self.overhead) / self.tokens_per_word))
        return " ".join(rng.choices(WORDS, k=count))


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if math.isfinite(number) else -1.0
