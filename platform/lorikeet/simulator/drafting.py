"""Tokens per second of decodes whose tokens are drafted, by the source of the drafts.

The rules are those of the engine (scheduling/draft_budget.py), for a steady state: all decodes have
about the same length, and drafts are as long as yields most tokens per second.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lorikeet_engine.costs import (
    DRAFT_GAP_S,
    LEAST_DRAFT_GAIN,
    MOST_DRAFTED,
    MOST_NOISE,
    StepCosts,
)

_Step = Callable[[float], float]
Source = Literal["lookup", "mtp", "draft"]

# Tokens of a span before its first drafted one: two are compared, one is in flight.
_UNFOUND = 3
# Assumed LoRA rank of a draft LoRA.
_DRAFT_RANK = 64


@dataclass(frozen=True, slots=True)
class Drafting:
    """Drafts of simulated replicas.

    source: what drafts, as in LORIKEET_SPECULATION.
    acceptance: probability, below 1, that a drafted token comes true if all before it do.
    found: share, from 0 to 1, of the answers' tokens in spans that lookups find.
    """

    source: Source = "lookup"
    acceptance: float = 0.0
    found: float = 0.7

    def per_s(self, costs: StepCosts, decodes: int, ranks: int, context: float) -> float:
        """Return the tokens per second that each decode gets in steps of decodes alone.

        Without drafts, if these are not expected to gain a tenth (LEAST_DRAFT_GAIN).

        costs: predicts the time of steps.
        decodes: number of decodes.
        ranks, context: as in StepCosts.step_s.
        """
        plain_s = costs.step_s(decodes, ranks, context)
        if not self.acceptance:
            return 1 / plain_s

        def step_s(more: float) -> float:
            """Return the seconds of a step with this many more tokens for each decode."""
            seen = round(more * context)
            return costs.step_s(round(decodes * (1 + more)), ranks, context, seen=seen)

        # each sampled token has a row of the logits, of which there are max_running
        most = costs.max_running // decodes - 1
        rates = {"lookup": self._looked_up, "mtp": self._by_head, "draft": self._by_lora}
        made = rates[self.source](costs, step_s, decodes, most)
        best = max(made, default=0.0)
        return best if best > LEAST_DRAFT_GAIN / plain_s else 1 / plain_s

    def _expected(self, drafted: int) -> float:
        """Return how many tokens of a draft come true."""
        return sum(self.acceptance**count for count in range(1, 1 + drafted))

    def _by_head(self, costs: StepCosts, step_s: _Step, _: int, most: int) -> Iterator[float]:
        """Yield the rate with one drafted token in each step; all decodes wait for the host."""
        if most >= 1:
            yield (1 + self.acceptance) / (step_s(1) + costs.head_s + DRAFT_GAP_S)

    def _by_lora(self, costs: StepCosts, step_s: _Step, _: int, most: int) -> Iterator[float]:
        """Yield rates with different numbers of noise tokens.

        Noise stands behind drafted tokens, too, where it costs little. It is lost unless all of
        them come true; then the next step has noise alone.
        """
        draft_s = costs.lora_s + costs.rank_s * _DRAFT_RANK
        for count in range(1, 1 + min(MOST_NOISE, most)):
            whole, drafts, both_s = self.acceptance**count, 1.0, step_s(count)
            if 2 * count <= most and step_s(2 * count) <= (1 + whole / 2) * both_s:
                drafts, both_s = 1 / (1 - whole), step_s(2 * count) + draft_s
            cycle_s = step_s(count) + draft_s + drafts * both_s + (1 + drafts) * DRAFT_GAP_S
            yield (1 + drafts * (1 + self._expected(count))) / cycle_s

    def _looked_up(self, _: StepCosts, step_s: _Step, decodes: int, most: int) -> Iterator[float]:
        """Yield rates with drafts of different lengths.

        An answer has spans of 1 / (1 − acceptance) tokens, and others between them. A decode with a
        draft waits for the host, in the next step unless it is the only decode.
        """
        span = 1 / (1 - self.acceptance)
        tokens, reached = span / self.found if self.found else 0.0, self.acceptance**_UNFOUND
        for count in range(1, 1 + MOST_DRAFTED) if tokens else ():
            drafts = reached / (1 - self.acceptance ** (count + 1))
            plain = tokens - span * reached
            if decodes == 1:
                yield tokens / (plain * step_s(0) + drafts * (step_s(count) + DRAFT_GAP_S))
                continue
            steps = plain + 2 * drafts
            more = drafts * (count - 1) / steps  # a decode that waits has no token in the step
            if more <= most:
                yield tokens / (steps * step_s(more))


NO_DRAFTS = Drafting()
