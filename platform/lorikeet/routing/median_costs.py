"""The costs that routing uses for each replica: the median replica's, or its own if it differs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from lorikeet.routing.ranking import CostCoefficients
from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import LoadCosts, MeasuredCosts, StepCosts

OUTLIER_FACTOR = 1.5
"""A replica whose times differ by this factor from the median's keeps its own costs."""
_ADAPTER_BYTES = 84_000_000

T = TypeVar("T")


def median_costs(
    measured: Mapping[str, MeasuredCosts], usual: CostCoefficients
) -> dict[str, CostCoefficients]:
    """The median replica's costs for all that are like it, their own for the others.

    No two measurements are equal: if each replica had its own, the one that seems fastest by a
    hair would get every adapter that is nowhere, and rendezvous would mean nothing. The
    price of a copy goes with the time of a step: on a slower engine waits are as much longer.
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
    """Seconds of a step of decodes, and of a prompt, with contexts of some hundred tokens."""
    return steps.step_s(32, 256, 32 * 500), steps.prefill_s(1000, 16)


def _load_times(loads: LoadCosts) -> tuple[float, ...]:
    tiers = (Residency.HOST, Residency.DISK, Residency.REMOTE)
    return tuple(loads.load_s(tier, _ADAPTER_BYTES) for tier in tiers)
