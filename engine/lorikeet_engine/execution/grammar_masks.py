"""The tokens that grammars allow next in the rows of a step."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lorikeet_engine.errors import EngineError, InvalidRequest
from lorikeet_engine.sampling.grammar import Grammars, Matcher, TokenBitmask, grammar_error
from lorikeet_engine.scheduling.sequence import Sequence


class AllowedTokens(NamedTuple):
    """By row, the only tokens that may be sampled. errors: of the rows whose grammar broke."""

    bitmasks: Mapping[int, TokenBitmask]
    errors: Mapping[int, EngineError]


class _Matched(NamedTuple):
    """A row whose next token a grammar restricts."""

    row: int
    sequence: Sequence
    matcher: Matcher


def allowed_tokens(
    grammars: Grammars | None, sequences: Mapping[int, Sequence], vocab: int
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
        return AllowedTokens({}, {})
    bitmasks = np.zeros((len(matched), -(-vocab // 8)), np.uint8)
    problems = _fill_bitmasks(grammars, matched, bitmasks)
    errors = {m.row: e for m, e in zip(matched, problems, strict=True) if e is not None}
    allowed = {m.row: b for m, b in zip(matched, bitmasks, strict=True) if m.row not in errors}
    return AllowedTokens(allowed, errors)


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
