"""How many ranks and prompt tokens a step of decodes may hold to meet the inter-token goal.

A step of decodes reads the weights of each of its adapters once, and the keys and values of all
that its sequences see:

    step_s = base_s + rank_s · Σ rank over its distinct adapters + seen_token_s · Σ context

The coefficients are measured at start (StepCosts). The base grows with the sequences, so it
follows the steps that run: what they took beyond the rest. So

    allowed Σ rank = (goal_s − base_s − seen_token_s · Σ context) / rank_s

and coefficients that are somewhat wrong only make the way to the right sum longer.

Prompts' tokens beside decodes get what is left of the goal: what more tokens take in a step, and
what they see, which is the most of it deep in a long prompt. What steps with prompts took beyond
that is learned as well. Where steps with prompts are padded to some numbers of tokens, they take as
long as the next larger one.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from statistics import median
from typing import NamedTuple

from lorikeet_engine.costs import StepCosts, seen_tokens
from lorikeet_engine.scheduling.sequence import Chunk, ScoredRows, Sequence

# The base is the median of this many steps: seven slow ones in a row change nothing, a new base
# counts after eight.
_MEDIAN_STEPS = 15
# Prompts go on even where decodes alone take longer than the goal.
_MIN_PROMPT_TOKENS = 128
# A chunk of fewer tokens than this is not begun in what others leave of the goal.
_SLIVER = 16
# Log probabilities of prompts' tokens. Writing these takes a replica 5 to 18 ms, in which other
# streams wait.
_SCORES = 2048


class ExpectedStep(NamedTuple):
    """What a step with decodes is expected to take, without what is learned from such steps.

    has_prompts: whether prompts are computed beside the decodes.
    """

    seconds: float
    has_prompts: bool


class StepBudget:
    """Follows the steps of one engine; belongs to its thread."""

    def __init__(self, goal_s: float, costs: StepCosts, sizes: tuple[int, ...] = ()) -> None:
        """Start from the base of full steps of decodes, until steps have run.

        costs: rank_s above 0. sizes: tokens to which steps with prompts are padded, ascending.
        """
        self._goal_s, self._costs, self._sizes = goal_s, costs, sizes
        base_s = costs.step_s(costs.max_running, 0) + costs.lora_s
        self._bases_s = deque([base_s], maxlen=_MEDIAN_STEPS)
        self._beside_s = deque([0.0], maxlen=_MEDIAN_STEPS)  # beyond what prompts were to take

    def max_ranks(self, context: float) -> float:
        """The Σ rank at which decodes that see N tokens just meet the goal.

        0 or less if none does.
        """
        left_s = self._goal_s - median(self._bases_s) - self._costs.seen_token_s * context
        return left_s / self._costs.rank_s

    def prompt_budget(self, decodes: list[Chunk], tokens: int) -> "PromptBudget":
        """The room for prompts beside these decodes, at most N tokens.

        Some may compute forced tokens, too.
        """
        rows = sum(chunk.length for chunk in decodes)
        expected_s = median(self._bases_s) + self._learned_from(decodes) + median(self._beside_s)
        return PromptBudget(tokens, self, rows, self._goal_s - expected_s)

    def more_s(self, decodes: int, tokens: int, seen: int) -> float:
        """How much longer decodes take with N tokens of prompts, which see M."""
        rows_s = self._costs.rows_s
        padded_s = rows_s(self._padded(decodes + tokens)) - rows_s(decodes)
        seen_s = self._costs.prompts_seen_s(seen, beside_decodes=decodes > 0)
        return padded_s + self._costs.lora_token_s * tokens + seen_s

    def expected(self, chunks: list[Chunk]) -> ExpectedStep | None:
        """What this step is expected to take, for `record`; None if it has no decodes."""
        decodes = [chunk for chunk in chunks if chunk.sequence.decodes]
        if not decodes:
            return None
        seconds = self._learned_from(decodes)
        prompts = [chunk for chunk in chunks if not chunk.sequence.decodes]
        if prompts:
            rows = sum(chunk.length for chunk in decodes)
            tokens = sum(chunk.length for chunk in prompts)
            seen = sum(seen_tokens(chunk.length, chunk.start) for chunk in prompts)
            seconds += median(self._bases_s) + self.more_s(rows, tokens, seen)
        return ExpectedStep(seconds, bool(prompts))

    def record(self, step_s: float, expected: ExpectedStep) -> None:
        """Learn how long a step took of which this was expected."""
        learned_s = self._beside_s if expected.has_prompts else self._bases_s
        learned_s.append(step_s - expected.seconds)

    def _learned_from(self, decodes: list[Chunk]) -> float:
        """What these decodes take beyond the base."""
        leases = (chunk.sequence.lease for chunk in decodes)
        ranks = sum({lease.slot: lease.rank for lease in leases if lease is not None}.values())
        context = sum(self._costs.decode_sees(chunk.end) for chunk in decodes)
        rows = sum(chunk.length for chunk in decodes)
        forced_s = self._costs.rows_s(rows) - self._costs.rows_s(len(decodes))
        return self._costs.rank_s * ranks + self._costs.seen_token_s * context + forced_s

    def _padded(self, tokens: int) -> int:
        at = bisect_left(self._sizes, tokens)
        return self._sizes[at] if at < len(self._sizes) else tokens


class PromptBudget:
    """The room of one step for tokens of prompts: N, and no more than a goal leaves time for.

    tokens: how many are left, whatever they take. scored: what of prompts the chunks score.
    """

    def __init__(
        self, tokens: int, budget: StepBudget | None = None, decodes: int = 0, left_s: float = 0.0
    ) -> None:
        """budget: of the goal, which leaves left_s to prompts beside N decodes, if any."""
        self.tokens = tokens
        self._budget, self._decodes, self._left_s = budget, decodes, left_s
        self._taken = self._seen = 0
        self.scored: list[ScoredRows] = []
        self._scores = _SCORES

    def __bool__(self) -> bool:
        """Whether some prompt may have room: one that is at its beginning has."""
        return self._has_room(0, self.tokens)

    def fits(self, sequence: Sequence, end: int | None = None) -> bool:
        """Whether there is room for more of a prompt; not for a sliver where a goal bounds it.

        One that is scored fits behind others that are if all that is left of it may be scored.
        end: the token up to which there are pages; None: its last.
        """
        if not self._has_room(sequence.kv.computed, _remaining(sequence, end)):
            return False
        return not sequence.to_score or not self.scored or self._may_score_all_of(sequence)

    def take(self, sequence: Sequence, end: int | None = None) -> Chunk:
        """The longest chunk that there is room for, of a prompt that fits. end: as in `fits`."""
        most = min(self.tokens, _remaining(sequence, end))
        if sequence.to_score:
            return self._take_scored(sequence, most)
        return self._take(sequence, most)

    def _take_scored(self, sequence: Sequence, most: int) -> Chunk:
        if not self._may_score_all_of(sequence):
            anew = sequence.remaining - 1 - sequence.to_score  # scored before a preemption
            most = min(most, anew + self._scores // _scores_each(sequence))
        chunk = self._take(sequence, most)
        scored = sequence.score(chunk)
        if scored.end > scored.start:
            self._scores -= _scores_each(sequence) * (scored.end - scored.start)
            self.scored.append(scored)
        return chunk

    def _may_score_all_of(self, sequence: Sequence) -> bool:
        return self._scores >= _scores_each(sequence) * sequence.to_score

    def _take(self, sequence: Sequence, most: int) -> Chunk:
        chunk = Chunk.of(sequence, self.tokens_within(sequence.kv.computed, most))
        self.tokens -= chunk.length
        self._taken += chunk.length
        self._seen += seen_tokens(chunk.length, chunk.start)
        return chunk

    def tokens_within(self, depth: int, most: int) -> int:
        """How many more tokens of a prompt the goal allows from this depth on, up to `most`."""
        if (budget := self._budget) is None:
            return most

        def takes_s(tokens: int) -> float:
            seen = self._seen + seen_tokens(tokens, depth)
            return budget.more_s(self._decodes, self._taken + tokens, seen)

        within = bisect_right(range(1, most + 1), self._left_s, key=takes_s)
        return min(most, max(within, _MIN_PROMPT_TOKENS - self._taken))

    def _has_room(self, depth: int, remaining: int) -> bool:
        least = min(self.tokens, remaining, 1 if self._budget is None else _SLIVER)
        return 0 < least <= self.tokens_within(depth, least)


def _remaining(sequence: Sequence, end: int | None) -> int:
    return sequence.remaining if end is None else end - sequence.kv.computed


def _scores_each(sequence: Sequence) -> int:
    """How many log probabilities each scored token of a prompt has."""
    return 1 + (sequence.request.sampling.prompt_logprobs or 0)
