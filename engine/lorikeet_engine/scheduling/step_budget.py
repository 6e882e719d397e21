"""What a step may hold beside its decodes' own work, so that tokens come often enough.

A step of decodes reads the weights of each of its adapters once:

    step_s = base_s + slope_s · Σ rank over its distinct adapters

The slope is measured at start: StepCosts.rank_s. The base grows with the sequences and their
contexts, so it follows the steps that run: what they took beyond slope · Σ rank. So

    allowed Σ rank = (goal_s − base_s) / slope_s = Σ rank of a recent step + what it left / slope_s

and a slope that is somewhat wrong only makes the way to the right sum longer.

Prompts' tokens beside decodes have what is left of the goal, at what one takes in a step that is
full of them. A small chunk takes less: its step reads the weights for the decodes anyhow. Where
passes are captured for some numbers of tokens, a step takes as long as the next larger one, so it
is filled up to one that fits.
"""

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from statistics import median

from lorikeet_engine.costs import StepCosts
from lorikeet_engine.scheduling.sequence import Chunk

# The median of so many steps: seven hiccups in a row change nothing, a new base counts after eight.
_STEPS = 15
# Prompts go on even where decodes alone take longer than the goal.
_LEAST_PROMPT_TOKENS = 128


class StepBudget:
    """Follows the steps of one engine; belongs to its thread."""

    def __init__(self, goal_s: float, costs: StepCosts, sizes: Sequence[int] = ()) -> None:
        """costs: rank_s above 0. Until steps have run, they are taken to be full.

        sizes: tokens of the passes that are captured, in order.
        """
        self._goal_s = goal_s
        self._sizes = sizes
        self._slope_s = costs.rank_s
        self._prompt_token_s = costs.prompt_token_s + costs.lora_token_s
        base_s = costs.decode_s(costs.max_running, 0) + costs.lora_s
        self._bases_s = deque([base_s], maxlen=_STEPS)

    @property
    def ranks(self) -> float:
        """The Σ rank with which a step of decodes takes as long as it may; 0 or less: with none."""
        return (self._goal_s - median(self._bases_s)) / self._slope_s

    def prompt_tokens(self, decodes: list[Chunk]) -> int:
        """How many of prompts fit beside these decodes."""
        left = self.ranks - _sum_of_ranks(decodes)
        tokens = len(decodes) + int(left * self._slope_s / self._prompt_token_s)
        if smaller := bisect(self._sizes, tokens):
            tokens = self._sizes[smaller - 1] if smaller < len(self._sizes) else tokens
        return max(_LEAST_PROMPT_TOKENS, tokens - len(decodes))

    def ranks_of(self, chunks: list[Chunk]) -> int | None:
        """Σ rank of a step's adapters, for `took`; None if it is not decodes alone."""
        decodes = all(chunk.length == 1 for chunk in chunks)
        return _sum_of_ranks(chunks) if decodes else None

    def took(self, seconds: float, ranks: int) -> None:
        """So long a step of decodes took under adapters of this Σ rank."""
        self._bases_s.append(seconds - self._slope_s * ranks)


def _sum_of_ranks(chunks: list[Chunk]) -> int:
    """Over distinct adapters."""
    leases = (chunk.sequence.lease for chunk in chunks)
    return sum({lease.slot: lease.rank for lease in leases if lease is not None}.values())
