"""What the requests that decode on a simulated replica see together."""

from typing import TYPE_CHECKING

from lorikeet_engine.costs import StepCosts

if TYPE_CHECKING:
    from lorikeet.simulator.fleet import SimulatedFleet


class DecodeContext:
    """Σ of StepCosts.decode_sees over requests, of which each grows along a line with the clock.

    Without windows they do; a request that goes beyond a window in its answer is taken to. The
    clock counts steps.
    """

    def __init__(self, fleet: "SimulatedFleet", steps: StepCosts) -> None:
        self._fleet, self._steps = fleet, steps
        self._begun = self._growth = 0.0  # at clock 0, as if all had been there; and for each step

    def add(self, request: int, clock: float) -> None:
        """Count a request that decodes its second token in the step after this clock."""
        first, growth = self._line(request)
        self._begun += first - growth * clock
        self._growth += growth

    def remove(self, request: int, clock: float) -> None:
        """Count a request no more, whose answer ends at this clock."""
        first, growth = self._line(request)
        self._begun -= first + growth * (self._fleet.answers[request] - 1) - growth * clock
        self._growth -= growth

    def at(self, clock: float) -> int:
        """What they see."""
        return round(self._begun + self._growth * clock)

    def _line(self, request: int) -> tuple[float, float]:
        prompt, answer = self._fleet.prompts[request], self._fleet.answers[request]
        first, last = map(self._steps.decode_sees, (prompt + 1, prompt + answer))
        return first, (last - first) / (answer - 1)
