"""Limits on the time of a step's prompt tokens, and on its adapters' ranks.

Prompt tokens deep in a long prompt take most of their time for attention. So that other prompts
wait no longer for a deep chunk than for a shallow one, a step's prompt tokens take at most as long
as the same number of first tokens of a prompt would take.

All else serves the inter-token latency goal, if there is one. A step of decodes reads the weights
of each of its adapters once, and the keys and values of all tokens that its sequences attend to
(the context):

    step_s = base_s + rank_s · Σ rank over its distinct adapters + seen_token_s · Σ context

The coefficients rank_s and seen_token_s are measured at start (StepCosts). base_s grows with the
number of sequences, so it is learned from the steps that run: it is the time that they took beyond
the other two terms. So

    allowed Σ rank = (goal_s − base_s − seen_token_s · Σ context) / rank_s

In a step with decodes, prompt tokens get the time that the decodes leave of the goal. Prompt tokens
cost the time of more rows in a step, and the time of attention. The time that steps with prompts
take beyond these costs is learned. Where steps with prompts are padded to certain sizes, they take
as long as the next larger size.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from statistics import median
from typing import NamedTuple

from lorikeet_engine.costs import StepCosts, seen_tokens
from lorikeet_engine.scheduling.sequence import Chunk, ScoredRows, Sequence

# The base is the median of this many steps: seven slow steps in a row change nothing, a new base
# counts after eight.
_MEDIAN_STEPS = 15
# Prompt tokens of a step even where they take longer than allowed.
_MIN_PROMPT_TOKENS = 128
# The prompt tokens of a step may always take this many times as long as a step of one token: many
# shorter steps would compute long prompts noticeably slower.
_FIXED_PARTS = 7
# No chunk has fewer tokens than this for want of time, unless the prompt ends.
_SLIVER = 16
# Sequences in the background may lengthen a step of others by this share.
_BACKGROUND = 0.03
# Steps of background sequences alone may take this many seconds, or this many times as long as a
# step of one token: a request that arrives waits for the step that runs.
_BACKGROUND_ALONE_S = 0.05
_BACKGROUND_ALONE_PARTS = 8
# Most log probabilities of prompt tokens in a step. A replica takes 5 to 18 ms to write this many,
# and other streams wait meanwhile.
_SCORES = 2048


class ExpectedStep(NamedTuple):
    """Expected time of a step with decodes, without the part that is learned from measured steps.

    seconds: the expected time. StepBudget.record learns how much longer the step took.
    has_prompts: whether the step computes prompts in addition to the decodes.
    """

    seconds: float
    has_prompts: bool


class StepBudget:
    """Limits on adapter ranks and prompt tokens, learned from one engine's steps.

    Only for the engine's thread.
    """

    def __init__(self, goal_s: float | None, costs: StepCosts, sizes: tuple[int, ...] = ()) -> None:
        """Start with a prediction for full steps of decodes, which is used until steps have run.

        goal_s: goal for the time between two tokens: the longest time that a step with decodes may
            take; None: no goal.
        costs: predicts the time of steps; with a goal, rank_s must be above 0.
        sizes: numbers of tokens to which steps with prompts are padded, ascending; empty without
            padding.
        """
        self._goal_s, self._costs, self._sizes = goal_s, costs, sizes
        base_s = costs.step_s(costs.max_running, 0) + costs.lora_s
        self._bases_s = deque([base_s], maxlen=_MEDIAN_STEPS)
        self._beside_s = deque([0.0], maxlen=_MEDIAN_STEPS)  # beyond the expected time of prompts
        self._least_s = _FIXED_PARTS * (costs.rows_s(1) + costs.pieces_s)

    def max_ranks(self, context: float) -> float:
        """Return the largest sum of adapters' ranks with which a step of decodes meets the goal.

        The result is 0 or less if a step without adapters would exceed the goal already, and
        infinite without a goal.

        context: number of tokens that the decodes attend to together.
        """
        if self._goal_s is None:
            return math.inf
        left_s = self._goal_s - median(self._bases_s) - self._costs.seen_token_s * context
        return left_s / self._costs.rank_s

    def prompt_budget(self, decodes: list[Chunk], tokens: int) -> "PromptBudget":
        """Return the budget for prompt tokens in a step with these decodes.

        decodes: the step's chunks of decoding sequences; some may compute forced tokens as well.
        tokens: maximum number of prompt tokens, whatever time they take.
        """
        rows = sum(chunk.length for chunk in decodes)
        left_s = max(self._least_s, self.more_s(rows, tokens, seen_tokens(tokens)))
        if decodes and self._goal_s is not None:
            decodes_s = median(self._bases_s) + self._learned_from(decodes)
            left_s = min(left_s, self._goal_s - decodes_s - median(self._beside_s))
        return PromptBudget(tokens, self, rows, left_s)

    def more_s(self, decodes: int, tokens: int, seen: int) -> float:
        """Return the seconds that prompt tokens add to a step of decodes.

        decodes: number of tokens that the decodes compute.
        tokens: number of prompt tokens.
        seen: number of (prompt token, token that it attends to) pairs.
        """
        rows_s = self._costs.rows_s
        padded_s = rows_s(self._padded(decodes + tokens)) - rows_s(decodes)
        seen_s = self._costs.prompts_seen_s(seen, beside_decodes=decodes > 0)
        return padded_s + self._costs.lora_token_s * tokens + seen_s

    def background_tokens(self, rows: int) -> int:
        """Return how many tokens of background sequences a step may compute beside foreground ones.

        They may lengthen the step by 3%.

        rows: number of tokens that the foreground's decodes compute; 0 in a step of prompts alone.
        """
        rows = max(1, rows)
        return self._tokens_within((1 + _BACKGROUND) * self._costs.rows_s(rows), rows)

    def background_tokens_alone(self) -> int:
        """Return how many tokens a step of background sequences alone may compute, at least 1."""
        most_s = max(_BACKGROUND_ALONE_S, _BACKGROUND_ALONE_PARTS * self._costs.rows_s(1))
        return max(1, self._tokens_within(most_s, 0))

    def _tokens_within(self, most_s: float, rows: int) -> int:
        """Return how many tokens beside `rows` others a step computes within `most_s` seconds."""
        more = range(1, self._costs.step_tokens + 1)
        return bisect_right(more, most_s, key=lambda tokens: self._costs.rows_s(rows + tokens))

    def expected(self, chunks: list[Chunk]) -> ExpectedStep | None:
        """Return the expected time of a step, to pass to `record` once the step has run.

        Returns None if the step has no decodes, or without a goal.
        """
        decodes = [chunk for chunk in chunks if chunk.sequence.decodes]
        if self._goal_s is None or not decodes:
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
        """Learn from a step that has run: keep step_s less the seconds in `expected`.

        Of a step without prompts, that is the base time of steps; of a step with prompts, the time
        that prompts take beyond their expected time.

        step_s: time that the step took.
        expected: what the method `expected` returned for the step.
        """
        learned_s = self._beside_s if expected.has_prompts else self._bases_s
        learned_s.append(step_s - expected.seconds)

    def _learned_from(self, decodes: list[Chunk]) -> float:
        """Return the seconds that decodes are predicted to take beyond the base time.

        The base time is what record() learns; beyond it, decodes take time for adapters, attention,
        forced and drafted tokens, and noise.
        """
        leases = (chunk.sequence.lease for chunk in decodes)
        ranks = sum({lease.slot: lease.rank for lease in leases if lease is not None}.values())
        context = sum(self._costs.decode_sees(chunk.end) for chunk in decodes)
        rows = sum(chunk.length + len(chunk.noise) for chunk in decodes)
        forced_s = self._costs.rows_s(rows) - self._costs.rows_s(len(decodes))
        return self._costs.rank_s * ranks + self._costs.seen_token_s * context + forced_s

    def _padded(self, tokens: int) -> int:
        at = bisect_left(self._sizes, tokens)
        return self._sizes[at] if at < len(self._sizes) else tokens


class PromptBudget:
    """Prompt tokens that one step may compute, limited by their number and by their time.

    tokens: prompt tokens that the step can still compute, whatever time they take.
    multiple: a chunk ends at a multiple of this many tokens of its prompt. Exceptions: the prompt's
        end, the place where an activated adapter begins to change tokens, and a chunk that would
        be empty.
    scored: for prompt_logprobs, the prompt tokens of the chunks taken so far from whose logits the
        log probability of the next prompt token is computed.
    """

    def __init__(
        self,
        tokens: int,
        budget: StepBudget | None = None,
        decodes: int = 0,
        left_s: float = 0.0,
    ) -> None:
        """Start with `tokens` prompt tokens, and with left_s seconds if `budget` is given.

        budget: predicts the time of prompt tokens; None: their time is not limited.
        decodes: number of tokens that the step's decodes compute.
        left_s: seconds that the prompt tokens may add to the step.
        """
        self.tokens, self.multiple = tokens, 1
        self._budget, self._decodes, self._left_s = budget, decodes, left_s
        self._taken = self._seen = 0
        self.scored: list[ScoredRows] = []
        self._scores = _SCORES

    def __bool__(self) -> bool:
        """Whether the first chunk of a new prompt would fit."""
        return self._has_room(0, self.tokens)

    def fits(self, sequence: Sequence, end: int | None = None) -> bool:
        """Whether a prompt can get a chunk in this step.

        False if there is time for very few tokens alone, unless they are the prompt's last. In a
        step that already scores one prompt (prompt_logprobs), another prompt to be scored can get a
        chunk only if the step may score all remaining tokens of that prompt.

        end: number of tokens, from the sequence's start, that have KV pages; None for all tokens.
        """
        if not self._has_room(sequence.kv.computed, _remaining(sequence, end)):
            return False
        return not sequence.to_score or not self.scored or self._may_score_all_of(sequence)

    def take(self, sequence: Sequence, end: int | None = None) -> Chunk:
        """Take the longest chunk that the budget allows. `fits` must be true for the prompt.

        end: number of tokens, from the sequence's start, that have KV pages; None for all tokens.
        """
        most = min(self.tokens, _remaining(sequence, end))
        if sequence.to_score:
            return self._take_scored(sequence, most)
        return self._take(sequence, most)

    def _take_scored(self, sequence: Sequence, most: int) -> Chunk:
        if not self._may_score_all_of(sequence):
            anew = sequence.remaining - 1 - sequence.to_score  # tokens scored before a preemption
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
        tokens, computed = self.tokens_within(sequence.kv.computed, most), sequence.kv.computed
        past = (computed + tokens) % self.multiple
        is_last = tokens == sequence.remaining or computed + tokens == sequence.active_from
        if not is_last and tokens > past:
            tokens -= past
        chunk = Chunk.of(sequence, tokens)
        self.tokens -= chunk.length
        self._taken += chunk.length
        self._seen += seen_tokens(chunk.length, chunk.start)
        return chunk

    def tokens_within(self, depth: int, most: int) -> int:
        """Return the number of further tokens of a prompt for which this step has time.

        depth: number of tokens of the prompt before these tokens.
        most: upper bound of the result.
        """
        if (budget := self._budget) is None:
            return most

        def takes_s(tokens: int) -> float:
            seen = self._seen + seen_tokens(tokens, depth)
            return budget.more_s(self._decodes, self._taken + tokens, seen)

        if takes_s(most) <= self._left_s:
            return most
        within = bisect_right(range(1, most + 1), self._left_s, key=takes_s)
        return min(most, max(within, _MIN_PROMPT_TOKENS - self._taken))

    def _has_room(self, depth: int, remaining: int) -> bool:
        least = min(self.tokens, remaining, 1 if self._budget is None else _SLIVER)
        return 0 < least <= self.tokens_within(depth, least)


def _remaining(sequence: Sequence, end: int | None) -> int:
    return sequence.remaining if end is None else end - sequence.kv.computed


def _scores_each(sequence: Sequence) -> int:
    """Return how many log probabilities prompt_logprobs reports for each prompt token: the token's
    own, and those of the most likely tokens.
    """
    return 1 + (sequence.request.sampling.prompt_logprobs or 0)
