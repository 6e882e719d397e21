"""Drafts of a sequence's next tokens, found in the sequence itself (prompt lookup decoding) or in
its adapter's recent answers.

Answers that extract from or edit their prompt repeat it, and answers of one adapter resemble each
other. So the tokens that followed an earlier occurrence of a sequence's last tokens are likely to
follow again (Saxena, "Prompt Lookup Decoding", 2023). Recent answers are those to the same tenant
with the same adapter (recent_answers.py), so a draft never contains another tenant's text.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lorikeet_engine.request import DraftSource
from lorikeet_engine.scheduling.recent_answers import END, AdapterAnswers, Tokens

# Tokens that must have occurred before, for a draft to be made of what followed them.
_SHORTEST, _LONGEST = 2, 4
# Latest tokens of a sequence that are searched; a search of them takes about 20 µs.
_WINDOW = 16_384
# Latest earlier occurrences of the last token that are compared further.
_OCCURRENCES = 256
# Weight of the newest token in the moving averages of the acceptance: of tokens after one that came
# true, and of others. A span of equal tokens ends once, and is followed for many tokens.
_NEWEST = {True: 1 / 16, False: 1 / 8}


class PromptLookup:
    """Prediction of one sequence's next tokens by the tokens that followed its last ones before.

    While predictions come true, the lookup follows the occurrence that it has found. Every token of
    the sequence is compared with its prediction, drafted or not, so the acceptance (the share of
    predictions that come true) is mostly known before the first draft. It is known apart for the
    first token after an occurrence and for tokens after one that came true. The acceptance begins
    with that of the adapter's last answers.

    source: kind of text in which the latest prediction was found: the sequence itself or recent
        answers.
    predicted: next tokens by `predictor`; () without any. They are no part of `predict`, but their
        acceptance is kept, too.
    predictor: the model's head for multi-token prediction, or the draft LoRA.
    """

    def __init__(
        self, tokens: Sequence[int], room: int, answers: AdapterAnswers | None = None
    ) -> None:
        """Start with the tokens that a sequence has.

        room: number of tokens that may follow.
        answers: recent answers to the same tenant with the same adapter; None: none are searched.
        """
        known = tokens[-_WINDOW:]
        self._tokens = np.empty(len(known) + room, np.int32)
        self._tokens[: len(known)] = known
        self._length = len(known)
        self._answers = AdapterAnswers() if answers is None else answers
        self._acceptance = dict(self._answers.acceptance)
        self.source, self._followed = DraftSource.LOOKUP, self._tokens
        self._next: int | None = None  # index in _followed of the token predicted to come next
        self._came = False  # whether the last prediction came true
        self._failures = 0  # since the last prediction that came true
        self._search_at = 0  # number of tokens from which to search again
        self.predicted: tuple[int, ...] = ()
        self.predictor = DraftSource.MTP

    @property
    def predictor_acceptance(self) -> float:
        """Moving average, from 0 to 1, of how often a token of `predicted` came true."""
        return self._acceptance[self.predictor, False]

    @property
    def acceptance(self) -> float:
        """Moving average, from 0 to 1, of how often a prediction from `source` came true after one
        that came true.
        """
        return self._acceptance[self.source, True]

    @property
    def first_acceptance(self) -> float:
        """Moving average, from 0 to 1, of how often predictions like the next one came true."""
        return self._acceptance[self.source, self._came]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens of the sequence, each of which is compared with its prediction."""
        for token in tokens:
            if self.predicted:
                came = self.predicted[0] == token
                self._count(self.predictor, came, after=False)
                self.predicted = self.predicted[1:] if came else ()
            if self._next is not None and self._followed[self._next] == END:
                self._next = None  # the answer that was followed ended here
            if self._next is not None:
                came = bool(self._followed[self._next] == token)
                self._count(self.source, came, after=self._came)
                self._came = came
                if came:
                    self._next, self._failures = self._next + 1, 0
                else:
                    self._fail()
            self._tokens[self._length] = token
            self._length += 1

    def predict(self, most: int, pause: int = 0) -> list[int]:
        """Return the next `most` tokens; [] if no earlier occurrence of the last tokens is found.

        If fewer tokens followed the occurrence in the sequence itself, they are repeated, since the
        sequence repeats itself. A prediction from an earlier answer ends where that answer ends.

        pause: maximum number of tokens without a search, if the last ones found nothing or a wrong
            token.
        """
        if self._next is None and self._length >= self._search_at:
            self._next, self._came = self._found(), False
            if self._next is None:
                self._fail()
            self._search_at = self._length + min(self._failures, 1 + pause)
        if self._next is None:
            return []
        if self.source is DraftSource.ANSWERS:
            followed = self._followed[self._next : self._next + most]
            (ends,) = np.nonzero(followed == END)
            followed = followed[: ends[0]] if len(ends) else followed
        else:
            followed = self._tokens[self._next : min(self._length, self._next + most)]
            if len(followed) < most:
                followed = np.resize(followed, most)
        predicted: list[int] = followed.tolist()
        return predicted

    def end(self, answers: AdapterAnswers) -> None:
        """Include the acceptance of the sequence's predictions in its adapter's mean.

        Call it when the sequence has ended.

        answers: recent answers to the same tenant with the same adapter.
        """
        for predicted, acceptance in self._acceptance.items():
            answers.record(predicted, acceptance)

    def _found(self) -> int | None:
        """Find the latest of the longest earlier occurrences of the last tokens, in the sequence
        or, if it is longer there, in recent answers.

        Returns the index of the token after it in _followed, which is set with `source`; None if
        there is none of at least _SHORTEST tokens.
        """
        first = max(0, self._length - _WINDOW)
        last = self._tokens[max(first, self._length - _LONGEST) : self._length]
        longest, at = _occurrence(self._tokens[first : self._length - 1], last)
        self.source, self._followed, at = DraftSource.LOOKUP, self._tokens, first + at
        if longest < _LONGEST:
            length, end = _occurrence(self._answers.tokens, last)
            if length > longest:
                self.source, self._followed = DraftSource.ANSWERS, self._answers.tokens
                longest, at = length, end
        return at if longest >= _SHORTEST else None

    def _count(self, source: DraftSource, came: bool, *, after: bool) -> None:
        """Include a token in the acceptance.

        came: whether the token came true.
        after: whether it followed a token that came true.
        """
        before = self._acceptance[source, after]
        self._acceptance[source, after] = before + _NEWEST[after] * (came - before)

    def _fail(self) -> None:
        self._next = None
        self._failures += 1


def _occurrence(text: Tokens, last: Tokens) -> tuple[int, int]:
    """Find the latest of the longest occurrences of a sequence's last tokens in a text.

    Returns the number of tokens that are equal, up to _LONGEST, and the index after them; (0, 0) if
    the last token does not occur.
    """
    (ends,) = np.nonzero(text == last[-1])
    if not len(ends):
        return 0, 0
    ends, length = ends[-_OCCURRENCES:], 1
    while length < len(last):
        before = ends[ends >= length]
        longer = before[text[before - length] == last[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return length, int(ends[-1]) + 1
