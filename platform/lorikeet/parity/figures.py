"""Figures of a parity proof: differences of log-probabilities, their bounds, verdict and cause."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

WARN_ABOVE, REFUSE_ABOVE = 0.05, 0.5
"""Default bounds on the mean of |Δ|, in nats.

The mean of |Δ| between two bfloat16 computations of one model is 0.002 to 0.03 (docs/adapters.md).
"""
_MAX_EXPONENT = 50.0
_BASE_ROUNDINGS = 3.0
_EFFECT_SHARE = 1 / 32
_LEAST = 1e-3


class Verdict(Enum):
    """Verdict of a parity proof: how near a replica's log-probabilities are to the trainer's."""

    ACCEPTED = "accepted"
    WARNED = "warned"
    REFUSED = "refused"


class GapCause(Enum):
    """Cause of a difference between the trainer's and the replica's log-probabilities."""

    SCALING = "scaling"
    TRANSPOSED = "transposed"
    MODULES = "modules"
    NO_ADAPTER = "no_adapter"
    VERSION = "version"
    BASE_MODEL = "base_model"
    QUANTIZATION = "quantization"
    PRECISION = "precision"
    TEMPLATE = "template"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on the mean difference between the trainer's and the replica's log-probabilities, in
    nats, above which a parity proof warns and refuses.
    """

    warn_above: float = WARN_ABOVE
    refuse_above: float = REFUSE_ABOVE


@dataclass(frozen=True, slots=True)
class Gap:
    """Differences Δ = log p(replica) − log p(trainer) of some tokens, in nats.

    mean, max: of |Δ|.
    kl: mean of exp(Δ) − 1 − Δ, an unbiased estimate of the trainer's KL divergence from the replica
        per token if the trainer sampled the tokens (Schulman 2020, "k3").
    """

    mean: float
    max: float
    kl: float

    @classmethod
    def of(cls, served: np.ndarray, trained: np.ndarray) -> "Gap":
        """Compare log-probabilities of the same tokens, [tokens] each.

        served: the replica's.
        trained: the trainer's.
        """
        delta = served.astype(np.float64) - trained
        size = np.abs(delta)
        kl = np.mean(np.expm1(np.minimum(delta, _MAX_EXPONENT)) - delta)
        return cls(float(size.mean()), float(size.max()), float(kl))


@dataclass(frozen=True, slots=True)
class Parity:
    """Result of a parity proof, kept with an adapter's version.

    tokens: number of compared tokens.
    mean, max: of |Δ|, where Δ = log p(replica) − log p(trainer) of a token, in nats.
    kl: estimate of the trainer's KL divergence from the replica per token, in nats.
    base_mean: mean of |Δ| of the base model without the adapter; None if the probes lack it.
    cause: None if accepted.
    reason: the cause in words, with a remedy; "" if accepted.
    """

    verdict: Verdict
    tokens: int
    mean: float
    max: float
    kl: float
    base_mean: float | None = None
    cause: GapCause | None = None
    reason: str = ""


def rounding(base: Gap, effect: float) -> float:
    """Return the largest mean of |Δ|, in nats, that rounding explains.

    The sum of three times that of the base model, 1/32 of the adapter's effect, and _LEAST.
    bfloat16 rounds A, B and their products by up to 1/256 each.

    base: gap of the base model without the adapter.
    effect: mean of |log p(adapter) − log p(base)| of the trainer.
    """
    return _BASE_ROUNDINGS * base.mean + _EFFECT_SHARE * effect + _LEAST


def judge(mean: float, bounds: Bounds, *, beyond_rounding: bool) -> Verdict:
    """Return the verdict on a mean of |Δ|, differences of log-probabilities in nats.

    beyond_rounding: whether the difference is known to be larger than rounding explains; it then
        gets a warning at least.
    """
    if mean > bounds.refuse_above:
        return Verdict.REFUSED
    if mean > bounds.warn_above or beyond_rounding:
        return Verdict.WARNED
    return Verdict.ACCEPTED


def joined(parts: Sequence[Sequence[float]]) -> np.ndarray:
    """Join the log-probabilities of several sequences of tokens (probes) to one array."""
    return np.concatenate([np.asarray(part, np.float64) for part in parts])
