"""How many ranks and prompt tokens a step of decodes may hold to meet the inter-token goal.

A step of decodes reads the weights of each of its adapters once:

    step_s = base_s + slope_s · Σ rank over its distinct adapters

The slope is measured at start: StepCosts.rank_s. The base grows with the sequences and their
contexts, so it follows the steps that run: what they took beyond slope · Σ rank. So

    allowed Σ rank = (goal_s − base_s) / slope_s
                   = Σ rank of a recent step + (goal_s − its step_s) / slope_s

and a slope that is somewhat wrong only makes the way to the right sum longer.

Prompts' tokens beside decodes get what is left of the goal, each at the time that it takes in a
step full of them. A small chunk takes less: its step reads the weights for the decodes anyhow.
Where forward passes are captured for some numbers of tokens, a step takes as long as the next
larger one, so it is filled up to one that fits.
"""

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from statistics import median

from lorikeet_engine.costs import StepCosts
from lorikeet_engine.scheduling.sequence import Chunk

# The base is the median of this many steps: seven slow ones in a row change nothing, a new base
# counts after eight.
_MEDIAN_STEPS = 15
# Prompts go on even where decodes alone take longer than the goal.
_MIN_PROMPT_TOKENS = 128


class StepBudget:
    """Follows the steps of one engine; belongs to its thread."""

    def __init__(self, goal_s: float, costs: StepCosts, sizes: Sequence[int] = ()) -> None:
        """Start from the base of full steps of decodes, until steps have run.

        costs: rank_s above 0. sizes: tokens of the captured forward passes, ascending.
        """
        self._goal_s = goal_s
        self._sizes = sizes
        self._slope_s = costs.rank_s
        self._prompt_token_s = costs.prompt_token_s + costs.lora_token_s
        base_s = costs.decode_s(costs.max_running, 0) + costs.lora_s
        self._bases_s = deque([base_s], maxlen=_MEDIAN_STEPS)

    @property
    def max_ranks(self) -> float:
        """The Σ rank at which a step of decodes just meets the goal; 0 or less if none does."""
        return (self._goal_s - median(self._bases_s)) / self._slope_s

    def max_prompt_tokens(self, decodes: list[Chunk]) -> int:
        """How many tokens of prompts fit beside these decodes."""
        left = self.max_ranks - _sum_of_ranks(decodes)
        tokens = len(decodes) + int(left * self._slope_s / self._prompt_token_s)
        if smaller := bisect(self._sizes, tokens):
            tokens = self._sizes[smaller - 1] if smaller < len(self._sizes) else tokens
        return max(_MIN_PROMPT_TOKENS, tokens - len(decodes))

    def decode_ranks(self, chunks: list[Chunk]) -> int | None:
        """Σ rank of a step's adapters, for `record`; None if the step is not decodes alone."""
        decodes = all(chunk.length == 1 for chunk in chunks)
        return _sum_of_ranks(chunks) if decodes else None

    def record(self, step_s: float, ranks: int) -> None:
        """Learn how long a step of decodes took under adapters of this Σ rank."""
        self._bases_s.append(step_s - self._slope_s * ranks)


def _sum_of_ranks(chunks: list[Chunk]) -> int:
    """The sum over the chunks' distinct adapters."""
    leases = (chunk.sequence.lease for chunk in chunks)
    return sum({lease.slot: lease.rank for lease in leases if lease is not None}.values())
