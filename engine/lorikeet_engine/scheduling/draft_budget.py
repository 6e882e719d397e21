"""Choice of the drafted tokens that a step verifies (speculative decoding).

A draft predicts tokens of a decoding sequence (prompt_lookup.py). The step computes the drafted
tokens behind the sequence's last token, and samples a token behind each of them, with the random
number that the token would be drawn with in a later step. As long as the sampled tokens equal the
drafted ones, each was computed from the right tokens, so all of them are the sequence's next
tokens: the same ones as without drafts. The keys and values behind the first different token are
written anew.

How many tokens a drafting sequence gets is known only once the host has read them, so the sequence
takes no part in the step that is launched meanwhile. With N tokens of decodes, forced ones
included, of which sequences with a draft have D, and K drafted tokens, of which E are expected to
come true, all decodes drafting get

    (N + E) / (step_s(N + K) + _GAP_S)    instead of    N / step_s(N)

tokens a second. If there are others, whose next step does not wait, they get

    (2 N − D + E) / (step_s(N + K) + step_s(N))

The inter-token goal, if one is set, bounds the time of a step with drafted tokens or noise.
Nothing else bounds how long others' steps become.

In a model with delta nets, a rejected token spoils the state. The state before the step is copied,
and the next step computes the step's tokens up to the first rejected one again. On CUDA, both steps
run as several graphs, which take pieces_s longer each.

The model's head for multi-token prediction (MTP) predicts one token after each sampled one, on the
device in head_s, so a draft of it is known once the host has read the token. A sequence that
decodes in every step has always a token that is not read yet. Therefore all decodes draft, or none:
if it pays, all pause until the host has read, and all of them wait after each step with drafts.

A draft LoRA of the base model makes the base model predict k tokens at once (Uno, vLLM PR #55947):
k random tokens, the noise, stand behind a sequence's last token. They are computed in the same step
with the draft LoRA, and from each of them the token after the next is predicted. The next step
verifies these k tokens. A step has noise behind drafted tokens, too, if that lengthens the step by
a share of at most p / 2, where p is the probability that all of them come true. Else steps
alternate, and two steps give

    2 N + E    tokens in    step_s(N + K) + draft_s + step_s(N + K) + 2 _GAP_S
"""

import math
from collections.abc import Mapping
from itertools import islice, takewhile
from random import Random
from statistics import fmean
from typing import NamedTuple

from lorikeet_engine.costs import (
    DRAFT_GAP_S,
    LEAST_DRAFT_GAIN,
    MOST_DRAFTED,
    MOST_NOISE,
    StepCosts,
)
from lorikeet_engine.request import DraftSource
from lorikeet_engine.scheduling.forced_budget import ForcedPieces
from lorikeet_engine.scheduling.recent_answers import RecentAnswers
from lorikeet_engine.scheduling.sequence import AdapterLease, Chunk, Sequence

# Acceptance below which no draft is made.
_LEAST_ACCEPTANCE = 0.25
_LEAST_GAIN = LEAST_DRAFT_GAIN
_GAP_S = DRAFT_GAP_S
# Steps in which nothing is predicted after a prediction that led to no draft.
_PAUSES = {DraftSource.MTP: 8, DraftSource.DRAFT: 32}
# About how many lookups may search in a step of many sequences, each in up to 30 µs; others pause.
_SEARCHES = 32
# Number of tokens by which drafts grow in turn, in the order in which most come true.
_PART = 4
_UNREAD = -1  # in place of a token that is not known yet


class _Draft(NamedTuple):
    """Draft of one sequence.

    first: probability that the first predicted token comes true.
    acceptance: probability that another token comes true if all tokens before it do.
    skipped: number of predicted tokens before the first drafted one that must come true as well:
        1 if the host has not read the last token and no tokens are forced after it, else 0.
    source: source of the tokens.
    """

    sequence: Sequence
    tokens: list[int]
    first: float
    acceptance: float
    skipped: int
    source: DraftSource

    def odds(self) -> list[float]:
        """Return for each drafted token the probability that it is accepted."""
        before = range(self.skipped, self.skipped + len(self.tokens))
        return [self.first * self.acceptance**count for count in before]

    def parts(self) -> list[list[float]]:
        """Return `odds` in parts of _PART tokens."""
        odds = self.odds()
        return [odds[at : at + _PART] for at in range(0, len(odds), _PART)]


class Drafts(NamedTuple):
    """Drafted tokens of a step.

    tokens: drafted tokens of sequences; {}: none.
    holds: whether all decodes take part in no other step until the host has read this one. Without
        drafted tokens: whether none takes part in this step, since drafts depend on tokens that the
        host has not read.
    """

    tokens: dict[Sequence, tuple[int, ...]]
    holds: bool = False


class DraftBudget:
    """Decides how many drafted tokens each sequence gets in a step (speculative decoding).

    The decision depends on how often the sequence's predictions came true so far, and on the
    predicted time of steps.

    answers: recent answers of adapters, in which drafts are found.
    adapter: lease of the draft LoRA; None until it is on the GPU.
    """

    def __init__(
        self,
        costs: StepCosts,
        sizes: tuple[int, ...] = (),
        goal_s: float | None = None,
        pieces: ForcedPieces | None = None,
        *,
        predictor: DraftSource | None = None,
        vocabulary: int = 0,
    ) -> None:
        """Start without answers.

        costs: predicts the time of steps.
        sizes: numbers of tokens to which small steps are padded, ascending; empty without padding.
        goal_s: longest time that a step with decodes may take; None: no goal.
        pieces: sizes and limits of steps with drafts, if these run as several CUDA graphs; None:
            they are padded like all small steps.
        predictor: the model's head for multi-token prediction or a draft LoRA, which draft, too.
        vocabulary: number of token ids of which a draft LoRA's noise is drawn.
        """
        self._costs, self._sizes, self._pieces = costs, sizes, pieces
        self._longest_s = math.inf if goal_s is None else goal_s
        self.answers = RecentAnswers()
        self._predictor = predictor
        self.adapter: AdapterLease | None = None
        self._predicts = 0  # tokens predicted after each sampled one in the last planned step
        self._pause = 0  # steps until the predictor predicts again
        self._noise, self._vocabulary = Random(0), vocabulary

    def ended(self, sequence: Sequence) -> None:
        """Keep the answer of a sequence that has ended, for drafts of its adapter's next ones."""
        prompt, end = sequence.prompt, sequence.prompt_length
        answers = self.answers.add(sequence.answers_key, prompt, sequence.tokens[end:])
        if sequence.lookup is not None:
            sequence.lookup.end(answers)

    def choose(self, decodes: list[Sequence], room: int, *, alone: bool) -> Drafts:
        """Return the drafted tokens of sequences in the next step; none if drafts would not pay.

        decodes: sequences that decode in the step.
        room: maximum number of drafted tokens.
        alone: whether no other foreground sequence computes, or waits for capacity of the step.
        """
        if room <= 0:
            return Drafts({})
        pause = len(decodes) // _SEARCHES
        drafts = [draft for each in decodes if (draft := self._draft_of(each, pause)) is not None]
        if alone:
            best = self._with_predicted(drafts, decodes) if self._predicting else drafts
            if counts := self._together(best, decodes, room):
                cut = _cut(best, counts)
                unread = any(_UNREAD in tokens for tokens in cut.values())
                return Drafts({} if unread else cut, holds=self._predicting is not None)
            predicting = self._predicting if self._predicts else None  # None without its LoRA
            if predicting and any(s.pending_rows or _predicted(s) for s in decodes):
                self._pause = _PAUSES[predicting]
        if not drafts or self._too_many(drafts):
            return Drafts({})
        parts = [(part, draft) for draft in drafts for part in draft.parts()]
        parts.sort(key=lambda each: -sum(each[0]))
        tokens = ((odds, draft) for part, draft in parts for odds in part)
        return Drafts(_cut(drafts, self._best([*islice(tokens, room)], decodes, together=False)))

    def predicts(self, chunks: list[Chunk], room: int, *, alone: bool) -> list[int]:
        """Return how many tokens are predicted after each chunk's sampled token; [] for none.

        The MTP head predicts one in steps of decodes alone, if drafts could pay were they all
        right. Of a draft LoRA it is the number that gives most tokens a second.

        chunks: the step's chunks.
        room: maximum number of drafted tokens in the next step, and of noise tokens in this one.
        alone: whether no other foreground sequence computes, or waits for capacity of the step;
            else the next step has no predicted tokens.
        """
        self._predicts = 0
        if self._predicting is None or not alone or not chunks or room <= 0:
            return []
        sequences = [chunk.sequence for chunk in chunks]
        if not all(sequence.decodes for sequence in sequences):
            return []
        if self._pause:
            self._pause -= 1
            return []
        if self._predicting is DraftSource.DRAFT:
            return self._noise_counts(chunks, room)
        certain = [
            _Draft(s, [_UNREAD], 1.0, 1.0, 0, DraftSource.MTP)
            for s in sequences
            if _drafts_left(s) > 0
        ]
        self._predicts = int(bool(self._together(certain, sequences, room)))
        return [1] * len(chunks) * self._predicts

    def noise(self, count: int) -> tuple[int, ...]:
        """Draw the tokens of noise: the draft LoRA is trained on uniformly random ones."""
        return tuple(self._noise.choices(range(self._vocabulary), k=count))

    @property
    def _predicting(self) -> DraftSource | None:
        """Predictor that can predict now."""
        lacks_lora = self._predictor is DraftSource.DRAFT and self.adapter is None
        return None if lacks_lora else self._predictor

    def _noise_counts(self, chunks: list[Chunk], room: int) -> list[int]:
        """Return the number of noise tokens behind each chunk of a step; [] for none.

        Noise are random tokens from which the draft LoRA predicts. If it has been wrong too often,
        it is tried with one token behind each chunk.

        room: as in `predicts`.
        """
        sequences, count = [chunk.sequence for chunk in chunks], len(chunks)
        rows = sum(chunk.length for chunk in chunks)
        known = [s.lookup.predictor_acceptance for s in sequences if s.lookup is not None]
        acceptance = fmean(known) if known else 1.0
        most = min(MOST_NOISE, (room - rows + count) // count)
        self._predicts = self._best_noise(sequences, acceptance, most)
        if not self._predicts and self._best_noise(sequences, 1.0, most):
            self._predicts = 1
        free, context = sum(not chunk.drafted for chunk in chunks), self._context(sequences)
        all_s, few_s = (
            self._step_s(count, rows - count + noisy * self._predicts, context)
            for noisy in (count, free)
        )
        allowed_s = self._longest_s - self._draft_s
        # noise behind drafted tokens saves a step if all of them come true
        came = [acceptance ** len(chunk.drafted) for chunk in chunks if chunk.drafted]
        everywhere = all_s <= min(allowed_s, (1 + sum(came) / count / 2) * few_s)
        counts = [
            max(0, min(self._predicts, _drafts_left(s) - len(chunk.drafted) - 1))
            if everywhere or not chunk.drafted
            else 0
            for s, chunk in zip(sequences, chunks, strict=True)
        ]
        if few_s > allowed_s or not any(counts):
            self._predicts, counts = 0, []
        return counts

    def _best_noise(self, sequences: list[Sequence], acceptance: float, most: int) -> int:
        """Return the number of noise tokens behind each sequence that yields most tokens a second;
        0 if drafts would not pay.

        acceptance: probability that a predicted token comes true if all before it do.
        most: upper bound of the result.
        """
        count, context = len(sequences), self._context(sequences)
        plain_s = self._step_s(count, 0, context)
        best, per_s, expected = 0, _LEAST_GAIN * count / plain_s, 0.0
        for tokens in range(1, most + 1):
            expected += count * acceptance**tokens
            step_s = self._step_s(count, count * tokens, context)
            if step_s + self._draft_s > self._longest_s:
                break
            both = (2 * count + expected) / (2 * step_s + self._draft_s + 2 * _GAP_S)
            if both > per_s:
                best, per_s = tokens, both
        return best

    @property
    def _draft_s(self) -> float:
        """Seconds by which the draft LoRA lengthens a step."""
        assert self.adapter is not None, "noise without a draft LoRA"
        return self._costs.lora_s + self._costs.rank_s * self.adapter.rank

    def _context(self, sequences: list[Sequence]) -> float:
        """Return the number of tokens that decodes of these sequences attend to."""
        return sum(self._costs.decode_sees(sequence.length) for sequence in sequences)

    def _with_predicted(self, drafts: list[_Draft], decodes: list[Sequence]) -> list[_Draft]:
        """Return drafts with those of the predictor of which more tokens will come true.

        drafts: drafts of other sources.
        """
        best = {draft.sequence: draft for draft in drafts}
        for sequence in decodes:
            draft, other = self._predicted_draft_of(sequence), best.get(sequence)
            if draft and (other is None or sum(draft.odds()) > sum(other.odds())):
                best[sequence] = draft
        return [*best.values()]

    def _too_many(self, drafts: list[_Draft]) -> bool:
        return self._pieces is not None and len(drafts) > self._pieces.sequences

    def _together(
        self, drafts: list[_Draft], decodes: list[Sequence], room: int
    ) -> dict[Sequence, int]:
        """Return the number of drafted tokens of each sequence, of which none computes in the next
        step; {} if drafts would not pay.

        Without a predictor, all must have a draft.
        """
        needs_all = self._predicting is None
        if not drafts or self._too_many(drafts) or (needs_all and len(drafts) < len(decodes)):
            return {}
        tokens = ((odds, draft) for draft in drafts for odds in draft.odds())
        likeliest = sorted(tokens, key=lambda token: -token[0])[:room]
        return self._best(likeliest, decodes, together=True)

    def _best(
        self, tokens: list[tuple[float, _Draft]], decodes: list[Sequence], *, together: bool
    ) -> dict[Sequence, int]:
        """Return the number of drafted tokens of each sequence that yields most tokens a second.

        Returns {} if drafts are not expected to yield _LEAST_GAIN times the tokens a second that
        steps without drafts yield.

        tokens: drafted tokens in the order in which they are taken, each as the probability that it
            is accepted and its draft.
        decodes: all sequences that decode in the step, with or without a draft.
        together: whether no sequence computes in the next step. Without a predictor, all must have
            a draft then.
        """
        count = sum(sequence.decode_tokens for sequence in decodes)
        context = self._context(decodes)
        plain_s = self._step_s(count, 0, context)
        # tokens that are computed again, with the right state, are no new ones
        made = {sequence: 1 + len(sequence.forced) for sequence in decodes}
        plain = sum(made.values())
        best, most = dict[Sequence, int](), _LEAST_GAIN * plain / plain_s
        counts, expected, begin = dict[Sequence, int](), 0.0, 0
        for end in self._ends(count, len(tokens)):
            for odds, draft in tokens[begin:end]:
                counts[draft.sequence] = counts.get(draft.sequence, 0) + 1
                expected += odds
            begin, step_s = end, self._step_s(count, end, context)
            if step_s > self._longest_s:
                break
            if not together:
                drafting = sum(made[sequence] for sequence in counts)
                per_s = (2 * plain - drafting + expected) / (step_s + plain_s)
            elif self._predicting or len(counts) == len(decodes):
                head_s = self._costs.head_s if self._predictor is DraftSource.MTP else 0.0
                per_s = (plain + expected) / (step_s + head_s + _GAP_S)
            else:
                continue
            if per_s > most:
                best, most = counts.copy(), per_s
        return best

    def _ends(self, decodes: int, most: int) -> list[int]:
        """Return the numbers of drafted tokens to consider, ascending: those that fill a step up to
        a size to which it is padded, and all tokens.

        decodes: number of tokens of decodes.
        most: number of all drafted tokens.
        """
        sizes = self._sizes if self._pieces is None else self._pieces.sizes
        sizes = sizes or tuple(decodes << power for power in range(1, 4))
        return sorted({min(size - decodes, most) for size in sizes if size > decodes} | {most})

    def _step_s(self, decodes: int, drafted: int, context: float) -> float:
        """Return the seconds of a step.

        decodes: number of tokens of decodes.
        drafted: number of drafted tokens.
        context: number of tokens that the decodes attend to.
        """
        tokens, costs = decodes + drafted, self._costs
        pieces = self._pieces if drafted else None
        sizes = self._sizes if pieces is None else pieces.sizes
        padded = next((size for size in sizes if size >= tokens), tokens)
        seen = drafted * context / decodes
        if pieces is None:
            return costs.step_s(padded, 0, context, seen=round(seen))
        more_s = 2 * costs.pieces_s  # the next step mostly computes tokens again
        return costs.step_s(padded, 0, context) + costs.prompt_seen_s * seen + more_s

    def _draft_of(self, sequence: Sequence, pause: int) -> _Draft | None:
        """Return the draft of a decoding sequence; None if it cannot have any.

        pause: as in PromptLookup.predict.
        """
        if not sequence.output_length or _drafts_left(sequence) < 1:
            return None
        lookup, forced = sequence.lookup, sequence.forced
        if lookup is None:
            lookup = sequence.begin_lookup(self.answers.of(sequence.answers_key))
            if self._predictor is not None:
                lookup.predictor = self._predictor
        skipped = len(sequence.pending_rows)
        first = skipped + len(forced)  # of the predicted tokens that may be drafted
        most = min(MOST_DRAFTED, _drafts_left(sequence))
        predicted = lookup.predict(first + most, pause)
        if lookup.first_acceptance < _LEAST_ACCEPTANCE:
            return None
        if forced:
            if tuple(predicted[skipped:first]) != forced:
                return None
            skipped = 0  # before forced tokens, no other token could be sampled
        tokens = list(takewhile(lambda token: token not in sequence.stop_ids, predicted[first:]))
        if not tokens:
            return None
        chances = lookup.first_acceptance, lookup.acceptance
        return _Draft(sequence, tokens, *chances, skipped, lookup.source)

    def _predicted_draft_of(self, sequence: Sequence) -> _Draft | None:
        """Return the predictor's draft of a decoding sequence; None if it cannot have any.

        The drafted tokens are _UNREAD if the host has not read the token before them.
        """
        lookup, left = sequence.lookup, _drafts_left(sequence)
        if lookup is None or sequence.forced or left < 1 or self._predicting is None:
            return None
        tokens, acceptance = lookup.predicted, lookup.predictor_acceptance
        if sequence.pending_rows:
            tokens = (_UNREAD,) * self._predicts
        drafted = list(takewhile(lambda t: t not in sequence.stop_ids, tokens[:left]))
        if not drafted or acceptance < _LEAST_ACCEPTANCE:
            return None
        return _Draft(sequence, drafted, acceptance, acceptance, 0, self._predicting)


def _predicted(sequence: Sequence) -> tuple[int, ...]:
    return () if sequence.lookup is None else sequence.lookup.predicted


def _drafts_left(sequence: Sequence) -> int:
    """Return how many tokens may be drafted before the last token of a sequence.

    None in the background: its sequences get only what others leave.
    """
    if sequence.background:
        return 0
    return sequence.max_tokens - sequence.output_length - 1


def _cut(drafts: list[_Draft], counts: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
    """Return the first tokens of drafts, by sequence.

    counts: number of tokens of each sequence; those without one are left out.
    """
    cut = dict[Sequence, tuple[int, ...]]()
    for draft in drafts:
        if count := counts.get(draft.sequence, 0):
            draft.sequence.drafted_from = draft.source
            cut[draft.sequence] = tuple(draft.tokens[:count])
    return cut
