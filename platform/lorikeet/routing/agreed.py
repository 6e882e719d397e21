"""What routing takes the costs of each replica to be, from what all of them measured."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from lorikeet.routing.costs import Costs
from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import LoadCosts, MeasuredCosts, StepCosts

UNLIKE = 1.5
"""By this factor a replica must differ from the middle one to be of another kind."""
_ADAPTER_BYTES = 84_000_000

T = TypeVar("T")


def agreed_costs(measured: Mapping[str, MeasuredCosts], usual: Costs) -> dict[str, Costs]:
    """The middle replica's costs for all that are like it, for the others their own.

    No two measurements are equal: if each replica had its own, the one that seems fastest by a
    hair would get every adapter that is nowhere, and rendezvous would mean nothing. What not
    making a copy is worth goes with the pace of steps: on a slower engine waits are as much longer.
    """
    steps = _agree({name: each.steps for name, each in measured.items()}, _step_times)
    loads = _agree({name: each.loads for name, each in measured.items()}, _load_times)
    return {
        name: replace(
            usual,
            steps=steps[name],
            loads=loads[name],
            copy_s=usual.copy_s * steps[name].base_s / usual.steps.base_s,
        )
        for name in measured
    }


def _agree(measured: Mapping[str, T], times: Callable[[T], Iterable[float]]) -> dict[str, T]:
    if not measured:
        return {}
    ranked = sorted(measured.values(), key=lambda each: sum(times(each)))
    middle = ranked[len(ranked) // 2]

    def like(each: T) -> bool:
        pairs = zip(times(each), times(middle), strict=True)
        return all(max(pair) < UNLIKE * min(pair) for pair in pairs)

    return {name: middle if like(each) else each for name, each in measured.items()}


def _step_times(steps: StepCosts) -> tuple[float, ...]:
    """Of a step of decodes, and of a prompt."""
    return steps.decode_s(32, 256), steps.prefill_s(1000, 16)


def _load_times(loads: LoadCosts) -> tuple[float, ...]:
    tiers = (Residency.HOST, Residency.DISK, Residency.REMOTE)
    return tuple(loads.load_s(tier, _ADAPTER_BYTES) for tier in tiers)
