"""Tokens that grammars allow next in the sequences of a step, and tokens that they force.

Behind each drafted token that the grammar allows, the mask is that of the output with this token.
"""

from collections.abc import Mapping
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np
import torch

from lorikeet_engine.costs import SEEN_IN_PIECES
from lorikeet_engine.device.async_copies import upload, zeros_to_upload
from lorikeet_engine.errors import EngineError, InvalidRequest
from lorikeet_engine.kernels.masks import forbid_others
from lorikeet_engine.sampling.grammar import (
    Grammars,
    Matcher,
    TokenBitmask,
    grammar_error,
    octets_of,
)
from lorikeet_engine.scheduling.forced_budget import ForcedBudget
from lorikeet_engine.scheduling.sequence import Chunk, Sequence, SequenceStatus


class AllowedTokens(NamedTuple):
    """Tokens that may be sampled in the rows of a step's logits that a grammar restricts.

    rows: rows of the logits that are restricted.
    bitmasks: [rows, octets_of(vocab)] uint8, a bit for each token, in the order of `rows`; None if
        no row is restricted.
    errors: by row, the error of a grammar that failed.
    forced: by row, the tokens that the grammar requires after the sampled token, for rows in which
        only one token may be sampled.
    followed: by a sequence's first row, how many of its drafted tokens can be accepted: those
        behind which the allowed tokens are known.
    """

    rows: list[int]
    bitmasks: torch.Tensor | None
    errors: Mapping[int, EngineError]
    forced: Mapping[int, tuple[int, ...]]
    followed: Mapping[int, int]

    def forbid_others(self, logits: torch.Tensor) -> None:
        """Set the logits of tokens that are not allowed to -inf, in place; the host never waits."""
        if self.bitmasks is not None:
            rows = upload(np.array(self.rows, np.int64), logits.device)
            forbid_others(logits, rows, self.bitmasks.to(logits.device, non_blocking=True))


class _Matched(NamedTuple):
    """Row of a step's logits whose next token a grammar restricts.

    matcher: has accepted all tokens before the row's token.
    drafted: drafted tokens from the row's place on.
    ahead: number of drafted tokens before the row's token.
    """

    row: int
    sequence: Sequence
    matcher: Matcher
    drafted: tuple[int, ...]
    ahead: int = 0

    def behind_draft(self) -> "_Matched | None":
        """Return the row behind the first of `drafted`; None if no token may follow it.

        The drafted token is accepted by a copy of a first row's matcher, or by a later row's own.
        """
        try:
            matcher = self.matcher if self.ahead else self.matcher.copy()
            matcher.accept(self.drafted[0])
            ends = matcher.must_end
        except BaseException:  # comes again if the token is sampled
            return None
        if ends:
            return None
        return _Matched(self.row + 1, self.sequence, matcher, self.drafted[1:], self.ahead + 1)


class _Masks:
    """Masks of the rows that grammars restrict, filled from each sequence's first row on.

    rows: restricted rows of the logits, in the order of their bitmasks.
    ends: last row of each sequence that has a mask, and the mask; no row if the grammar failed or
        the drafted tokens end the output.
    errors: by row, the error of a grammar that failed.
    followed: by a sequence's first row, how many of its drafted tokens can be accepted.
    """

    def __init__(self, grammars: Grammars, first: list[_Matched], bitmasks: TokenBitmask) -> None:
        """Fill the bitmasks.

        first: first row of each sequence.
        bitmasks: [rows, octets_of(vocab)] uint8, zeros at first, at least as many as needed.
        """
        self.rows, self.ends = list[int](), list[tuple[_Matched, TokenBitmask]]()
        self.errors, self.followed = dict[int, EngineError](), dict[int, int]()
        while first:
            some = bitmasks[len(self.rows) :][: len(first)]
            problems = _fill_bitmasks(grammars, first, some)
            self.rows += [matched.row for matched in first]
            triples = zip(first, some, problems, strict=True)
            behind = [self._next(*triple) for triple in triples]
            first = [matched for matched in behind if matched is not None]

    def failed(self, matched: _Matched, error: EngineError) -> None:
        """Record that no token can be sampled in a row.

        A row behind drafted tokens is given up: if it is reached, its error comes in the next step.
        """
        if matched.ahead:
            self.followed[matched.row - matched.ahead] = matched.ahead - 1
        else:
            self.errors[matched.row] = error

    def _next(
        self, matched: _Matched, bitmask: TokenBitmask, problem: EngineError | None
    ) -> _Matched | None:
        """Record a row's mask; return the next row to mask, behind the row's drafted token.

        Returns None if the row has no drafted token, if the grammar fails or forbids the token, or
        if the output must end behind it.

        bitmask: the row's mask, already filled.
        problem: error of the row's grammar; None without one.
        """
        if problem is not None:
            bitmask[:] = 255  # the row's token is ignored
            self.failed(matched, problem)
            return None
        if matched.drafted or matched.ahead:
            self.followed[matched.row - matched.ahead] = matched.ahead
        if matched.drafted and _allows(matched.drafted[0], bitmask):
            return matched.behind_draft()
        self.ends.append((matched, bitmask))
        return None


def allowed_tokens(
    grammars: Grammars | None, chunks: list[Chunk], logits: torch.Tensor, budget: ForcedBudget
) -> AllowedTokens:
    """Ask the grammars of a step's sequences for the allowed tokens, by row.

    Sequences without a grammar get no row in the result. Each sequence's matcher must have accepted
    all tokens of its output so far.

    grammars: None on an engine without grammars.
    chunks: the step's chunks in the order of the batch.
    logits: [rows, vocab], the step's logits; only their width and device are used.
    budget: bounds the next step's forced tokens, the only ones that a grammar allows.
    """
    first, row = list[_Matched](), 0
    for chunk in chunks:
        sequence, matcher = chunk.sequence, chunk.sequence.matcher
        finished = sequence.status is SequenceStatus.FINISHED
        if chunk.completes and matcher is not None and not finished:
            first.append(_Matched(row, sequence, matcher, chunk.drafted))
        row += chunk.rows
    if grammars is None or not first:
        return AllowedTokens([], None, {}, {}, {})
    vocab, most = logits.shape[-1], sum(1 + len(matched.drafted) for matched in first)
    held = zeros_to_upload((most, octets_of(vocab)), torch.uint8, logits.device)
    masks = _Masks(grammars, first, held.numpy())
    decoding = [chunk.sequence for chunk in chunks if chunk.completes]
    taken, forced = _ForcedTokens(budget, decoding, vocab), dict[int, tuple[int, ...]]()
    for matched, bitmask in budget.rotated(masks.ends):
        try:
            forced[matched.row] = taken.take(matched, bitmask)
        except BaseException as error:  # a panic in Rust is no Exception
            masks.failed(matched, grammar_error(error, matched.sequence.request.request_id))
    taken.close()
    return AllowedTokens(masks.rows, held[: len(masks.rows)], masks.errors, forced, masks.followed)


class _ForcedTokens:
    """Forced tokens chosen for the next step; tokens beyond the budget are left to later steps.

    A forced token is the only one that a grammar allows, so it is not sampled. Their number, and
    that of the tokens that they attend to, is bounded so that the step remains a single graph on
    CUDA (cuda_graphs.py). With delta nets the step is several graphs, which limit the number of
    sequences with forced tokens.
    """

    def __init__(self, budget: ForcedBudget, sequences: list[Sequence], vocab: int) -> None:
        """Start without having taken any forced tokens from the budget.

        sequences: sequences that sample a token in this step and decode it in the next.
        vocab: number of tokens that can be sampled.
        """
        self._budget, self._vocab = budget, vocab
        self._beside_others = not all(map(_may_force, sequences))
        context = sum(sequence.length for sequence in sequences)
        self._tokens = budget.tokens_allowed(
            len(sequences), context, beside_others=self._beside_others
        )
        self._sequences, self._seen = budget.most_sequences, SEEN_IN_PIECES
        self._taken = self._taken_see = 0

    def close(self) -> None:
        """Subtract the time that the chosen forced tokens take from the budget's saved time.

        Subtracts nothing if every sequence of the step may have forced tokens.
        """
        if self._beside_others and self._taken:
            self._budget.spend(self._taken, self._taken_see)

    def take(self, matched: _Matched, bitmask: TokenBitmask) -> tuple[int, ...]:
        """Return the forced tokens to compute with the next token; empty if tokens can be chosen.

        The forced tokens follow the only token that the row can sample. They end before a stop id,
        which is left to be sampled. No tokens are forced where the device must count each token
        (penalties) or report its log probability.

        matched: row whose forced tokens are returned.
        bitmask: tokens that may be sampled in this row.
        """
        sequence = matched.sequence
        if self._tokens <= 0 or self._sequences <= 0 or not _may_force(sequence):
            return ()
        length = sequence.length + matched.ahead + self._tokens  # at most, when they are computed
        left = sequence.max_tokens - sequence.output_length - matched.ahead - 1
        most = min(left, self._tokens, (self._seen - 1) // length - 1)
        tokens = matched.matcher.forced_tokens() if most > 0 else ()
        if len(tokens) < 2 or not _allows_only(tokens[0], bitmask):
            return ()
        text = takewhile(lambda t: t < self._vocab and t not in sequence.stop_ids, tokens)
        forced = tuple(islice(text, 1, 1 + most))
        self._sequences -= bool(forced)
        self._tokens -= len(forced)
        self._seen -= (1 + len(forced)) * length
        self._taken += len(forced)
        self._taken_see += len(forced) * sequence.length
        return forced


def _may_force(sequence: Sequence) -> bool:
    params = sequence.request.sampling
    return sequence.matcher is not None and not params.changes_logits and params.logprobs is None


def _allows(token: int, bitmask: TokenBitmask) -> bool:
    return bool(bitmask[token // 8] >> token % 8 & 1)


def _allows_only(token: int, bitmask: TokenBitmask) -> bool:
    return np.count_nonzero(bitmask) == 1 and bool(bitmask[token // 8] == 1 << token % 8)


def _fill_bitmasks(
    grammars: Grammars, matched: list[_Matched], bitmasks: TokenBitmask
) -> list[EngineError | None]:
    """Set the bits of the allowed tokens; return the error of each row, or None.

    If the grammars' own code fails for all rows together, rows are filled one by one.

    bitmasks: [rows, octets_of(vocab)] uint8, zeros at first, in the order of `matched`.
    """
    try:
        problems = grammars.fill_bitmasks([m.matcher for m in matched], bitmasks)
        for m, bitmask in zip(matched, bitmasks, strict=True):
            _set_stop_ids(m, bitmask)
        largest = bitmasks.max(axis=1)
        return [
            p or (None if most else _stuck()) for p, most in zip(problems, largest, strict=True)
        ]
    except BaseException as error:  # a panic in Rust is no Exception
        if len(matched) == 1:
            return [grammar_error(error, matched[0].sequence.request.request_id)]
    bitmasks[:] = 0
    return [
        problem
        for i, one in enumerate(matched)
        for problem in _fill_bitmasks(grammars, [one], bitmasks[i : i + 1])
    ]


def _stuck() -> InvalidRequest:
    return InvalidRequest("the grammar reached a state that no token can follow")


def _set_stop_ids(matched: _Matched, bitmask: TokenBitmask) -> None:
    """Allow stop ids where the output may end, and forbid them below min_tokens.

    Below min_tokens they remain allowed if no other token can follow.

    bitmask: tokens that the matcher allows in the row; changed in place.
    """
    sequence = matched.sequence
    stops = [(token // 8, 1 << token % 8) for token in sequence.stop_ids]
    if sequence.output_length + matched.ahead < sequence.request.sampling.min_tokens:
        others = bitmask.copy()
        for octet, bit in stops:
            others[octet] &= 255 ^ bit
        if others.max():
            bitmask[:] = others
            return
    if matched.matcher.may_end:
        for octet, bit in stops:
            bitmask[octet] |= bit
