"""Workload models: popularity of adapters, arrival processes, length models, recorded traces.

Tests, benchmarks, load tests and the simulator draw their requests from them, with a NumPy
Generator or a seed: equal seeds give equal traffic. Importing this module loads NumPy alone.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RANKS = (8, 16, 32, 64)


class Popularity(Protocol):
    """Distribution of requests over adapters, which are numbered from the most popular to the
    least.
    """

    def draw(self, rng: np.random.Generator, adapters: int, requests: int, /) -> Ints:
        """Draw the adapter of each request, [requests] in [0, adapters)."""


@dataclass(frozen=True, slots=True)
class Distinct:
    """Adapters in turn: none repeats before all have been requested."""

    def draw(self, _rng: np.random.Generator, adapters: int, requests: int, /) -> Ints:
        """Return 0, 1, 2, … modulo `adapters`; nothing is random."""
        return np.arange(requests, dtype=np.int64) % adapters


@dataclass(frozen=True, slots=True)
class Identical:
    """One adapter for every request."""

    def draw(self, _rng: np.random.Generator, _adapters: int, requests: int, /) -> Ints:
        """Return zeros."""
        return np.zeros(requests, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Zipf:
    """Zipf's law: the k-th most popular of N adapters gets the fraction k^-s / Σ j^-s of requests.

    exponent: s; 0 is uniform.
    """

    exponent: float

    def shares(self, adapters: int) -> Floats:
        """Return each adapter's fraction of the requests, [adapters], falling, with sum 1."""
        weights: Floats = np.arange(1, adapters + 1, dtype=np.float64) ** -self.exponent
        shares: Floats = weights / weights.sum()
        return shares

    def draw(self, rng: np.random.Generator, adapters: int, requests: int, /) -> Ints:
        """Draw the adapter of each request independently, with the probabilities of `shares`."""
        return rng.choice(adapters, size=requests, p=self.shares(adapters))


UNIFORM = Zipf(0.0)


def parse_popularity(text: str) -> Popularity:
    """Parse 'distinct', 'uniform', 'identical' or 'zipf:EXPONENT', such as 'zipf:1.2'.

    Raises ValueError for any other text.
    """
    known: dict[str, Popularity] = {
        "distinct": Distinct(),
        "uniform": UNIFORM,
        "identical": Identical(),
    }
    name, _, exponent = text.partition(":")
    if text in known:
        return known[text]
    if name == "zipf" and _is_number(exponent):
        return Zipf(float(exponent))
    raise ValueError(f"popularity {text!r}: want distinct, uniform, identical or zipf:<exponent>")


def choose_adapters(
    popularity: Popularity, adapters: int, times_s: Floats, *, seed: int, reshuffle_s: float
) -> Ints:
    """Choose the adapter of each request, [requests], with a changing order of popularity.

    popularity: distribution of requests over the order.
    times_s: arrival times, rising.
    reshuffle_s: seconds after which a new order is drawn; math.inf for one order throughout.
    """
    epochs = np.floor_divide(times_s, reshuffle_s).astype(np.int64)
    chosen = np.empty(len(times_s), dtype=np.int64)
    for epoch in np.unique(epochs):
        rng = np.random.default_rng([seed, int(epoch)])
        order, now = rng.permutation(adapters), epochs == epoch
        chosen[now] = order[popularity.draw(rng, adapters, int(now.sum()))]
    return chosen


def deal_ranks(adapters: int, ranks: Sequence[int] = RANKS) -> Ints:
    """Return the rank of each adapter, [adapters]: `ranks` in turn, over and over."""
    return np.resize(np.asarray(ranks, dtype=np.int64), adapters)


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Arrivals with Gamma-distributed gaps of mean 1 / rate.

    cv: coefficient of variation of the gaps; 1 is a Poisson process, more makes bursts.
    """

    rate_per_s: float
    cv: float

    def times(self, rng: np.random.Generator, duration_s: float) -> Floats:
        """Draw arrival times in seconds, rising, all below `duration_s`; the first comes after a
        gap.
        """
        shape = self.cv**-2
        scale = 1 / (self.rate_per_s * shape)
        drawn: list[Floats] = []
        last = 0.0
        while last < duration_s:
            gaps = rng.gamma(shape, scale, size=max(16, math.ceil(self.rate_per_s * duration_s)))
            drawn.append(last + np.cumsum(gaps))
            last = float(drawn[-1][-1])
        times = np.concatenate(drawn) if drawn else np.empty(0)
        return times[times < duration_s]


def poisson(rate_per_s: float) -> GammaArrivals:
    """Return independent arrivals at a constant rate."""
    return GammaArrivals(rate_per_s, cv=1.0)


@dataclass(frozen=True, slots=True)
class LengthModel:
    """Lognormal prompt and answer lengths in tokens.

    *_mu, *_sigma: mean and standard deviation of the length's natural logarithm.
    """

    input_mu: float
    input_sigma: float
    output_mu: float
    output_sigma: float

    def draw(self, rng: np.random.Generator, requests: int) -> tuple[Ints, Ints]:
        """Draw (input tokens, output tokens), [requests] each, at least 1."""
        inputs = rng.lognormal(self.input_mu, self.input_sigma, requests)
        outputs = rng.lognormal(self.output_mu, self.output_sigma, requests)
        return _whole(inputs), _whole(outputs)


# Fitted to the Azure LLM inference traces of 2023 (Patel et al., Splitwise, ISCA 2024).
AZURE_CONV = LengthModel(6.63, 0.99, 5.02, 0.86)
AZURE_CODE = LengthModel(7.00, 1.36, 2.79, 0.85)
LENGTH_MODELS = {"conv": AZURE_CONV, "code": AZURE_CODE}


def cut_to_context(inputs: Ints, outputs: Ints, context: int) -> tuple[Ints, Ints]:
    """Cut lengths until input + output ≤ context: inputs first, down to half the context."""
    outputs = np.minimum(outputs, np.maximum(context - inputs, context // 2))
    return np.minimum(inputs, context - outputs), outputs


@dataclass(frozen=True, slots=True)
class TrafficTrace:
    """Recorded traffic to replay: arrival, prompt and answer length of each request, [requests].

    times_s: arrival times, rising from 0.
    inputs, outputs: tokens.
    """

    times_s: Floats
    inputs: Ints
    outputs: Ints

    def __len__(self) -> int:
        return len(self.times_s)

    @classmethod
    def read(cls, path: Path) -> "TrafficTrace":
        """Read a CSV with columns TIMESTAMP, ContextTokens, GeneratedTokens.

        Raises ValueError if the file has no rows, lacks a column or has values of another kind.
        """
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            raise ValueError(f"{path} holds no requests")
        try:
            stamps = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
            inputs = _whole([float(row["ContextTokens"]) for row in rows])
            outputs = _whole([float(row["GeneratedTokens"]) for row in rows])
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: {error}; want TIMESTAMP, ContextTokens, …") from error
        times_s = np.array([(stamp - stamps[0]).total_seconds() for stamp in stamps])
        return cls(times_s, inputs, outputs)

    def at_rate(self, rate_per_s: float) -> "TrafficTrace":
        """Return the trace sped up or slowed down to a mean rate, bursts included."""
        factor = (len(self) - 1) / (rate_per_s * self.times_s[-1])
        return TrafficTrace(self.times_s * factor, self.inputs, self.outputs)

    def until(self, duration_s: float) -> "TrafficTrace":
        """Return the requests that arrive before `duration_s`."""
        kept = self.times_s < duration_s
        return TrafficTrace(self.times_s[kept], self.inputs[kept], self.outputs[kept])


def _whole(values: Floats | list[float]) -> Ints:
    return np.maximum(np.rint(values), 1).astype(np.int64)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
