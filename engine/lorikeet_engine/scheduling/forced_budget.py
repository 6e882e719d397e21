"""How many tokens that grammars force a step may compute beside other requests' tokens.

Forced tokens let their own sequence skip steps, and make the step that computes them longer for all
others in it. So what they take is reckoned by StepCosts, and others lose a share of their time by
it, in the mean:

    Σ more_s(forced tokens of a step) ≤ SHARE · Σ step_s(decodes of a step)

Where steps are captured for some sizes, the first token beyond one of them costs as much as all up
to the next. So nothing is taken until a whole size can be paid for; what is forced then comes in
one step of three, say, and fills it.
"""

from bisect import bisect_right
from typing import TypeVar

from lorikeet_engine.costs import StepCosts

Row = TypeVar("Row")

SHARE = 0.03
"""Answers under grammars may cost those beside them 5%; masks and more prompts cost some of it."""
_MOST = 128  # in a step: up to 128 rows a GPU mostly reads the weights
_SAVED_STEPS = 16  # what steps have not used is kept for the last so many


class ForcedBudget:
    """Follows the steps of one engine; belongs to its thread."""

    def __init__(self, most: int, costs: StepCosts, sizes: tuple[int, ...] = ()) -> None:
        """most: how many tokens a step has room for beside all that may run.

        sizes: tokens to which small steps are padded, ascending.
        """
        self._most, self._costs, self._sizes = min(_MOST, most), costs, sizes
        self._left_s = 0.0
        self._decodes = self._turns = 0

    def tokens_allowed(self, decodes: int, context: int, *, beside_others: bool) -> int:
        """How many forced tokens the next step may compute.

        decodes: how many it has; context: Σ of their lengths. beside_others: whether it has other
        sequences than such as forced tokens help.
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
        """Note how many forced tokens it will compute beside others, and what these see."""
        self._left_s -= self._more_s(tokens, seen)

    def rotated(self, rows: list[Row]) -> list[Row]:
        """The rows in an order in which each comes first in its turn."""
        first = self._turns % len(rows)
        self._turns += 1
        return rows[first:] + rows[:first]

    def _sizes_worth_paying(self) -> range | list[int]:
        """How many tokens may be worth their cost, ascending."""
        if not self._sizes:
            return range(1, self._most + 1)
        return [n for size in self._sizes if 0 < (n := size - self._decodes) <= self._most]

    def _more_s(self, tokens: int, seen: float) -> float:
        """How much longer a step takes with forced tokens."""
        rows_s = self._costs.rows_s
        rows = self._padded(self._decodes + tokens), self._padded(self._decodes)
        seen_s = self._costs.prompts_seen_s(round(seen), beside_decodes=True)
        return rows_s(rows[0]) - rows_s(rows[1]) + seen_s

    def _padded(self, tokens: int) -> int:
        return next((size for size in self._sizes if size >= tokens), tokens)
