"""Limit on the forced tokens that steps compute beside other requests' tokens.

A forced token is the only one that a request's grammar allows after the token before it, so it is
appended without sampling (jump-forward decoding). Forced tokens let their own sequence skip steps,
but lengthen the step that computes them for all other sequences. So their time is estimated by
StepCosts, and limited to a mean share of the time that the other sequences' decodes take:

    Σ more_s(forced tokens of a step) ≤ SHARE · Σ step_s(decodes of a step)

Where CUDA graphs pad steps to certain sizes, forced tokens are taken only when the budget suffices
to fill a step up to the next size. In a model with delta nets, a step with forced tokens is not one
graph but several, with sizes of their own.
"""

from bisect import bisect_right
from typing import NamedTuple, TypeVar

from lorikeet_engine.costs import StepCosts

Row = TypeVar("Row")

SHARE = 0.03
"""Limit on the time that forced tokens add to steps, as a share of the decodes' time.

Grammars may slow answers by 5% in all. Forced tokens get 3%; the other 2% are for grammars' token
masks and for additional prompts.
"""
_MOST = 128  # tokens in a step: up to 128 rows a GPU mostly reads the weights
_SAVED_STEPS = 16  # steps whose unused share is kept


class ForcedPieces(NamedTuple):
    """Steps with forced tokens that run as several CUDA graphs, unlike steps of decodes alone.

    sizes: numbers of tokens to which these steps are padded, ascending.
    sequences: largest number of sequences that may have forced tokens in such a step.
    """

    sizes: tuple[int, ...]
    sequences: int


class ForcedBudget:
    """Limit on the forced tokens that each step of one engine may compute.

    A forced token is the only one that the grammar allows: it is computed without being sampled.
    Only for the engine's thread.

    Time allowed for forced tokens that a step does not use is saved for later steps.

    most_sequences: largest number of sequences that may have forced tokens in a step.
    """

    def __init__(
        self,
        most: int,
        costs: StepCosts,
        sizes: tuple[int, ...] = (),
        pieces: ForcedPieces | None = None,
    ) -> None:
        """Start with no time saved for forced tokens.

        most: number of tokens that a step can compute in addition to one for each running sequence.
        costs: predicts the time of steps.
        sizes: numbers of tokens to which small steps are padded, ascending; empty without padding.
        pieces: sizes and limits of steps with forced tokens, if these run as several CUDA graphs;
            None: they are padded like all small steps.
        """
        self._most, self._costs, self._sizes = min(_MOST, most), costs, sizes
        self._in_pieces = pieces is not None
        self._forced_sizes = sizes if pieces is None else pieces.sizes
        self.most_sequences = _MOST if pieces is None else pieces.sequences
        self._left_s = 0.0
        self._decodes = self._turns = 0

    def tokens_allowed(self, decodes: int, context: int, *, beside_others: bool) -> int:
        """Return how many forced tokens the next step may compute.

        decodes: number of decodes in the step.
        context: total length of the decoding sequences, in tokens.
        beside_others: whether the step has sequences that cannot have forced tokens, and that
            forced tokens of others would delay. If False, only the size of a step limits forced
            tokens.
        """
        self._decodes = decodes
        if not beside_others:
            return self._most
        step_s = self._costs.step_s(_padded(decodes, self._sizes), 0, context)
        self._left_s = min(self._left_s + SHARE * step_s, _SAVED_STEPS * SHARE * step_s)
        sizes = self._sizes_worth_paying()
        affordable = bisect_right(
            sizes, self._left_s, key=lambda tokens: self._more_s(tokens, tokens * context / decodes)
        )
        return sizes[affordable - 1] if affordable else 0

    def spend(self, tokens: int, seen: int) -> None:
        """Subtract the time of the next step's forced tokens from the time saved for such tokens.

        tokens: number of forced tokens.
        seen: number of (forced token, token that it attends to) pairs.
        """
        self._left_s -= self._more_s(tokens, seen)

    def rotated(self, rows: list[Row]) -> list[Row]:
        """Return the rows, rotated by one more place at each call, so that each is first in turn.

        rows: values of any type, one for each sequence that may get forced tokens.
        """
        first = self._turns % max(1, len(rows))
        self._turns += 1
        return rows[first:] + rows[:first]

    def _sizes_worth_paying(self) -> range | list[int]:
        """Return the numbers of forced tokens that fill the next step to a padded size, ascending.

        Without padding, these are all numbers up to the limit.
        """
        if not self._forced_sizes:
            return range(1, self._most + 1)
        return [n for size in self._forced_sizes if 0 < (n := size - self._decodes) <= self._most]

    def _more_s(self, tokens: int, seen: float) -> float:
        """Return the seconds that forced tokens add to a step.

        seen: number of (forced token, token that it attends to) pairs.
        """
        costs, rows_s = self._costs, self._costs.rows_s
        more = _padded(self._decodes + tokens, self._forced_sizes)
        seen_s = costs.prompts_seen_s(round(seen), beside_decodes=True)
        if self._in_pieces:
            seen_s = costs.prompt_seen_s * seen + costs.pieces_s
        return rows_s(more) - rows_s(_padded(self._decodes, self._sizes)) + seen_s


def _padded(tokens: int, sizes: tuple[int, ...]) -> int:
    return next((size for size in sizes if size >= tokens), tokens)
