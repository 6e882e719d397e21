"""How fast an engine works while it has all that it can do, measured over its last seconds."""

import math
import time

from lorikeet_engine.costs import StepCosts
from lorikeet_engine.scheduling.fairness import OUTPUT_TOKEN

# Weights of past work fall by a factor e in this time.
_DECAY_S = 5.0
# The length of answers until some have ended, and over how many it is averaged.
_ANSWER_TOKENS = 128.0
_ANSWERS = 100


class Throughput:
    """The cost of the work done per second, as fairness.py counts cost, and answers' mean length.

    saturated: whether sequences wait only because steps have no room. Only such time is measured;
    until there is any, the throughput is that of full batches of decodes.
    """

    def __init__(self, costs: StepCosts) -> None:
        step_s = costs.step_s(costs.max_running, 0)
        self._cost, self._s = OUTPUT_TOKEN * costs.max_running / step_s, 1.0
        self._step_cost, self._planned_s = 0.0, time.monotonic()
        self.saturated = False
        self.answer_tokens = _ANSWER_TOKENS

    @property
    def cost_per_s(self) -> float:
        """The cost of the work done per second."""
        return self._cost / self._s

    def add(self, cost: float) -> None:
        """Add work that the device was given."""
        self._step_cost += cost

    def step_planned(self, saturated: bool) -> None:
        """Close the account of the step before. saturated: for the step that was planned now."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._planned_s
        if self.saturated:
            decay = math.exp(-elapsed_s / _DECAY_S)
            self._cost = self._cost * decay + self._step_cost
            self._s = self._s * decay + elapsed_s
        self._step_cost, self._planned_s, self.saturated = 0.0, now_s, saturated

    def answer_ended(self, tokens: int) -> None:
        """Count an answer of this many tokens in their mean length."""
        self.answer_tokens += (tokens - self.answer_tokens) / _ANSWERS
