"""Drafts of a sequence's next tokens, found in the sequence itself (prompt lookup decoding).

Answers that extract from or edit their prompt repeat it. So the tokens that followed an earlier
occurrence of a sequence's last tokens are likely to follow again (Saxena, "Prompt Lookup Decoding",
2023). A lookup reads the tokens of its own sequence only, so a draft never contains another
tenant's text.
"""

from collections.abc import Iterable, Sequence

import numpy as np

# Tokens that must have occurred before, for a draft to be made of what followed them.
_SHORTEST, _LONGEST = 2, 4
# Latest tokens of a sequence that are searched; a search of them takes about 20 µs.
_WINDOW = 16_384
# Latest earlier occurrences of the last token that are compared further.
_OCCURRENCES = 256
# After searches that found nothing or a wrong token, so many tokens at most pass without a search.
_PAUSE = 8
# Weight of the newest token in the moving average of the acceptance.
_NEWEST = 1 / 8


class PromptLookup:
    """Prediction of one sequence's next tokens by the tokens that followed its last ones before.

    While predictions come true, the lookup follows the occurrence that it has found. Every token of
    the sequence is compared with its prediction, drafted or not, so the acceptance is known before
    the first draft.

    acceptance: moving average, from 0 to 1, of how often a prediction came true.
    """

    def __init__(self, tokens: Sequence[int], room: int) -> None:
        """Start with the tokens that a sequence has.

        room: number of tokens that may follow.
        """
        known = tokens[-_WINDOW:]
        self._tokens = np.empty(len(known) + room, np.int32)
        self._tokens[: len(known)] = known
        self._length = len(known)
        self._next: int | None = None  # index of the token that is predicted to come next
        self._failures = 0  # since the last prediction that came true
        self._search_at = 0  # number of tokens from which to search again
        self.acceptance = 0.0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens of the sequence, each of which is compared with its prediction."""
        for token in tokens:
            if self._next is not None:
                came = bool(self._tokens[self._next] == token)
                self.acceptance += _NEWEST * (came - self.acceptance)
                if came:
                    self._next, self._failures = self._next + 1, 0
                else:
                    self._fail()
            self._tokens[self._length] = token
            self._length += 1

    def predict(self, most: int) -> list[int]:
        """Return the next `most` tokens; [] if no earlier occurrence of the last tokens is found.

        If fewer tokens followed the earlier occurrence, they are repeated, since the sequence
        repeats itself.
        """
        if self._next is None and self._length >= self._search_at:
            self._next = self._found()
            if self._next is None:
                self._fail()
        if self._next is None:
            return []
        followed = self._tokens[self._next : min(self._length, self._next + most)]
        if len(followed) < most:
            followed = np.resize(followed, most)
        predicted: list[int] = followed.tolist()
        return predicted

    def _found(self) -> int | None:
        """Return the index of the token after the latest of the longest earlier occurrences of the
        last tokens; None if there is none of at least _SHORTEST tokens.
        """
        known = self._tokens[max(0, self._length - _WINDOW) : self._length]
        (ends,) = np.nonzero(known[:-1] == known[-1:])
        if not len(ends):
            return None
        ends = ends[-_OCCURRENCES:]
        for length in range(1, _LONGEST):  # tokens that are known to be equal
            ends_before = ends[ends >= length]
            longer = ends_before[known[ends_before - length] == known[-1 - length]]
            if not len(longer):
                if length < _SHORTEST:
                    return None
                break
            ends = longer
        return int(ends[-1]) + 1 + self._length - len(known)

    def _fail(self) -> None:
        self._next = None
        self._search_at = self._length + min(self._failures, _PAUSE)
        self._failures += 1
