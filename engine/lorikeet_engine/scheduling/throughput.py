"""How fast an engine works that has all it can do, by its last seconds."""

import math
import time

from lorikeet_engine.costs import StepCosts
from lorikeet_engine.scheduling.fairness import OUTPUT_TOKEN

# So far back what was done counts, with a weight that fades.
_SPAN_S = 5.0
# Until answers have ended: as long as they are often.
_ANSWER_TOKENS = 128.0
_ANSWERS = 100


class Throughput:
    """Tokens' worth per second, as fairness.py counts it, and how long answers are.

    full: whether somebody is kept waiting by the step's room alone. Only such time is counted;
    until there is any, the pace is that of full batches of decodes.
    """

    def __init__(self, costs: StepCosts) -> None:
        step_s = costs.decode_s(costs.max_running, 0)
        self._worth, self._s = OUTPUT_TOKEN * costs.max_running / step_s, 1.0
        self._done, self._since_s = 0.0, time.monotonic()
        self.full = False
        self.answer_tokens = _ANSWER_TOKENS

    @property
    def per_s(self) -> float:
        """Tokens' worth per second."""
        return self._worth / self._s

    def did(self, worth: float) -> None:
        """So much was given to the device."""
        self._done += worth

    def planned(self, full: bool) -> None:
        """The next step is planned. full: as above."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._since_s
        if self.full:
            fade = math.exp(-elapsed_s / _SPAN_S)
            self._worth = self._worth * fade + self._done
            self._s = self._s * fade + elapsed_s
        self._done, self._since_s, self.full = 0.0, now_s, full

    def ended(self, made: int) -> None:
        """An answer has ended, of so many tokens."""
        self.answer_tokens += (made - self.answer_tokens) / _ANSWERS
