"""Cost coefficients per replica: the median replica's, or a replica's own if they differ much."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from lorikeet.routing.ranking import CostCoefficients
from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import LoadCosts, MeasuredCosts, StepCosts

OUTLIER_FACTOR = 1.5
"""Factor by which a replica's times must differ from the median replica's for the replica's own
times to be used.
"""
_ADAPTER_BYTES = 84_000_000
"""Adapter size, in bytes, for which load times are compared."""

T = TypeVar("T")


def median_costs(
    measured: Mapping[str, MeasuredCosts], usual: CostCoefficients
) -> dict[str, CostCoefficients]:
    """Return cost coefficients by replica: the median replica's, or its own if they differ much.

    If each replica had its own costs, the one that seems fastest by a hair would get every adapter
    that no replica holds.

    `copy_s`, the seconds worth waiting to avoid another copy of an adapter, scales with the time of
    a step, since waits on a slower engine are longer in the same proportion.

    measured: costs that each replica has measured.
    usual: coefficients whose values are used for all fields that are not measured.
    """
    steps = _median_or_own({name: each.steps for name, each in measured.items()}, _step_times)
    loads = _median_or_own({name: each.loads for name, each in measured.items()}, _load_times)
    return {
        name: replace(
            usual,
            steps=steps[name],
            loads=loads[name],
            copy_s=usual.copy_s * steps[name].step_s(1, 0) / usual.steps.step_s(1, 0),
        )
        for name in measured
    }


def _median_or_own(
    measured: Mapping[str, T], times: Callable[[T], Iterable[float]]
) -> dict[str, T]:
    if not measured:
        return {}
    ranked = sorted(measured.values(), key=lambda each: sum(times(each)))
    median = ranked[len(ranked) // 2]

    def like(each: T) -> bool:
        pairs = zip(times(each), times(median), strict=True)
        return all(max(pair) < OUTLIER_FACTOR * min(pair) for pair in pairs)

    return {name: median if like(each) else each for name, each in measured.items()}


def _step_times(steps: StepCosts) -> tuple[float, ...]:
    """Return the seconds of a typical decode step and of a typical prefill.

    The decode step has 32 sequences with contexts of 500 tokens; the prefill has 1,000 tokens.
    """
    return steps.step_s(32, 256, 32 * 500), steps.prefill_s(1000, 16)


def _load_times(loads: LoadCosts) -> tuple[float, ...]:
    tiers = (Residency.HOST, Residency.DISK, Residency.REMOTE)
    return tuple(loads.load_s(tier, _ADAPTER_BYTES) for tier in tiers)
