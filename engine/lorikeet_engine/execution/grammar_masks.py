"""The tokens that grammars allow next in the rows of a step, and those that they force."""

from collections.abc import Mapping
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np

from lorikeet_engine.costs import SEEN_IN_PIECES
from lorikeet_engine.errors import EngineError, InvalidRequest
from lorikeet_engine.sampling.grammar import Grammars, Matcher, TokenBitmask, grammar_error
from lorikeet_engine.scheduling.sequence import Sequence
from lorikeet_engine.settings import EngineSettings

# The most tokens that are forced in a step: up to 128 rows a GPU mostly reads the weights.
_MOST_FORCED = 128


class AllowedTokens(NamedTuple):
    """The only tokens that may be sampled, by row. errors: of the rows whose grammar broke.

    forced: of rows where one token alone may be sampled, those that must follow it.
    """

    bitmasks: Mapping[int, TokenBitmask]
    errors: Mapping[int, EngineError]
    forced: Mapping[int, tuple[int, ...]]


class _Matched(NamedTuple):
    """A row whose next token a grammar restricts."""

    row: int
    sequence: Sequence
    matcher: Matcher


def allowed_tokens(
    grammars: Grammars | None,
    sequences: Mapping[int, Sequence],
    vocab: int,
    settings: EngineSettings,
) -> AllowedTokens:
    """Ask the grammars of these sequences, by row; rows without a grammar are in no result.

    The matchers must have accepted all tokens before.
    """
    matched = [
        _Matched(row, s, s.matcher)
        for row, s in sequences.items()
        if s.matcher is not None and not s.ended
    ]
    if grammars is None or not matched:
        return AllowedTokens({}, {}, {})
    bitmasks = np.zeros((len(matched), -(-vocab // 8)), np.uint8)
    problems = _fill_bitmasks(grammars, matched, bitmasks)
    errors = {m.row: e for m, e in zip(matched, problems, strict=True) if e is not None}
    room = _ForcedRoom(min(_MOST_FORCED, settings.max_batch_tokens - settings.max_running), vocab)
    forced = dict[int, tuple[int, ...]]()
    for m, bitmask in zip(matched, bitmasks, strict=True):
        if m.row not in errors:
            try:
                forced[m.row] = room.take(m, bitmask)
            except BaseException as error:  # as a panic in Rust is
                errors[m.row] = grammar_error(error, m.sequence.request.request_id)
    allowed = {m.row: b for m, b in zip(matched, bitmasks, strict=True) if m.row not in errors}
    return AllowedTokens(allowed, errors, forced)


class _ForcedRoom:
    """The room for forced tokens in the step that follows one: what is left, later steps force.

    They are computed in one chunk with the token before them, and each sees what came before it. So
    many are taken that the step remains a single graph on CUDA (cuda_graphs.py).
    """

    def __init__(self, tokens: int, vocab: int) -> None:
        self._tokens, self._seen, self._vocab = tokens, SEEN_IN_PIECES, vocab

    def take(self, matched: _Matched, bitmask: TokenBitmask) -> tuple[int, ...]:
        """The tokens to take behind the one that a row samples, if it has no other choice.

        A stop id among them is left to be sampled, and so are all where the device must count each
        or say how likely it is.
        """
        sequence, params = matched.sequence, matched.sequence.request.sampling
        if self._tokens <= 0 or params.changes_logits or params.logprobs is not None:
            return ()
        length = sequence.length + self._tokens  # at most, when they are computed
        left = sequence.max_tokens - sequence.output_length - 1
        most = min(left, self._tokens, (self._seen - 1) // length - 1)
        tokens = matched.matcher.forced_tokens() if most > 0 else ()
        if len(tokens) < 2 or not _allows_only(tokens[0], bitmask):
            return ()
        text = takewhile(lambda t: t < self._vocab and t not in sequence.stop_ids, tokens)
        forced = tuple(islice(text, 1, 1 + most))
        self._tokens -= len(forced)
        self._seen -= (1 + len(forced)) * length
        return forced


def _allows_only(token: int, bitmask: TokenBitmask) -> bool:
    return np.count_nonzero(bitmask) == 1 and bool(bitmask[token // 8] == 1 << token % 8)


def _fill_bitmasks(
    grammars: Grammars, matched: list[_Matched], bitmasks: TokenBitmask
) -> list[EngineError | None]:
    """Set the bits of the tokens that may follow; return what went wrong with each row.

    Where the grammars' own code breaks, rows are filled one by one: only those that break it fail.
    """
    try:
        problems = grammars.fill_bitmasks([m.matcher for m in matched], bitmasks)
        return [
            problem or _finish_bitmask(m, bitmask)
            for m, bitmask, problem in zip(matched, bitmasks, problems, strict=True)
        ]
    except BaseException as error:  # as a panic in Rust is
        if len(matched) == 1:
            return [grammar_error(error, matched[0].sequence.request.request_id)]
    bitmasks[:] = 0
    return [
        problem
        for i, one in enumerate(matched)
        for problem in _fill_bitmasks(grammars, [one], bitmasks[i : i + 1])
    ]


def _finish_bitmask(matched: _Matched, bitmask: TokenBitmask) -> InvalidRequest | None:
    """Set the bits of a row's stop ids; return an error if no token can follow then."""
    _set_stop_ids(matched.sequence, matched.matcher, bitmask)
    if bitmask.max():
        return None
    return InvalidRequest("the grammar came to where no token can follow")


def _set_stop_ids(sequence: Sequence, matcher: Matcher, bitmask: TokenBitmask) -> None:
    """Allow stop ids where the output may end, and forbid them below min_tokens.

    Below min_tokens they stay allowed where nothing else can follow.
    """
    stops = [(token // 8, 1 << token % 8) for token in sequence.stop_ids]
    if sequence.below_min_tokens:
        others = bitmask.copy()
        for octet, bit in stops:
            others[octet] &= 255 ^ bit
        if others.max():
            bitmask[:] = others
            return
    if matcher.may_end:
        for octet, bit in stops:
            bitmask[octet] |= bit
