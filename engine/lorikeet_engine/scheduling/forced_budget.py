"""Budget of tokens that grammars force, in steps that also compute other requests' tokens.

Forced tokens let their own sequence skip steps, but lengthen the step that computes them for all
other sequences. So their time is estimated by StepCosts, and limited to a mean share of the time
that the other sequences' decodes take:

    Σ more_s(forced tokens of a step) ≤ SHARE · Σ step_s(decodes of a step)

Where steps are captured for certain sizes, the first token beyond a size costs as much as all up to
the next size. So no forced token is taken until the budget is enough for a whole size; then one
step, in three say, takes enough forced tokens to fill the size.
"""

from bisect import bisect_right
from typing import TypeVar

from lorikeet_engine.costs import StepCosts

Row = TypeVar("Row")

SHARE = 0.03
"""Most time that forced tokens add to steps, as a share of the time of these steps' decodes.

Answers under grammars may cost 5%; the rest is for masks and for more prompts.
"""
_MOST = 128  # tokens in a step: up to 128 rows a GPU mostly reads the weights
_SAVED_STEPS = 16  # steps whose unused share is kept


class ForcedBudget:
    """Budget of forced tokens for the steps of one engine. Only for the engine's thread."""

    def __init__(self, most: int, costs: StepCosts, sizes: tuple[int, ...] = ()) -> None:
        """Start with an empty budget.

        most: tokens that a step can compute in addition to one for each running sequence.
        costs: predicts the time of steps.
        sizes: numbers of tokens to which small steps are padded, ascending; empty without padding.
        """
        self._most, self._costs, self._sizes = min(_MOST, most), costs, sizes
        self._left_s = 0.0
        self._decodes = self._turns = 0

    def tokens_allowed(self, decodes: int, context: int, *, beside_others: bool) -> int:
        """Return how many forced tokens the next step may compute.

        decodes: number of decodes in the step.
        context: Σ length of the decoding sequences.
        beside_others: whether the step has sequences that cannot have forced tokens, and so would
            only be delayed.
        """
        self._decodes = decodes
        if not beside_others:
            return self._most
        step_s = self._costs.step_s(self._padded(decodes), 0, context)
        self._left_s = min(self._left_s + SHARE * step_s, _SAVED_STEPS * SHARE * step_s)
        sizes = self._sizes_worth_paying()
        affordable = bisect_right(
            sizes, self._left_s, key=lambda tokens: self._more_s(tokens, tokens * context / decodes)
        )
        return sizes[affordable - 1] if affordable else 0

    def spend(self, tokens: int, seen: int) -> None:
        """Charge the budget for forced tokens that the next step computes.

        tokens: number of forced tokens.
        seen: number of tokens that they attend to, added up over the forced tokens.
        """
        self._left_s -= self._more_s(tokens, seen)

    def rotated(self, rows: list[Row]) -> list[Row]:
        """Return the rows rotated, by one more place at each call: each row is first in turn."""
        first = self._turns % len(rows)
        self._turns += 1
        return rows[first:] + rows[:first]

    def _sizes_worth_paying(self) -> range | list[int]:
        """Return the numbers of forced tokens that fill a step up to one of the sizes, ascending.

        Returns all numbers if steps are not padded to sizes.
        """
        if not self._sizes:
            return range(1, self._most + 1)
        return [n for size in self._sizes if 0 < (n := size - self._decodes) <= self._most]

    def _more_s(self, tokens: int, seen: float) -> float:
        """Return the seconds that forced tokens add to a step.

        tokens: number of forced tokens.
        seen: number of tokens that they attend to, added up over the forced tokens.
        """
        rows_s = self._costs.rows_s
        rows = self._padded(self._decodes + tokens), self._padded(self._decodes)
        seen_s = self._costs.prompts_seen_s(round(seen), beside_decodes=True)
        return rows_s(rows[0]) - rows_s(rows[1]) + seen_s

    def _padded(self, tokens: int) -> int:
        return next((size for size in self._sizes if size >= tokens), tokens)
