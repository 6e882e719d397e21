"""Recent answers of each adapter, in which drafts of its next answers are found.

Answers of one adapter resemble each other. Answers are kept by tenant, salt and adapter digest, as
pages in the prefix cache are, so a draft never contains another tenant's or another adapter's text.
"""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lorikeet_engine.request import DraftSource

Tokens = npt.NDArray[np.int32]

END = -1
"""Stands behind each answer in AdapterAnswers.tokens; no token has this id."""
LEAD = 3
"""Number of prompt tokens that are kept before each answer, so that its first tokens are found."""

# Tokens of the answers that are kept of one adapter; a search of them takes about 10 µs.
_ADAPTER_TOKENS = 8192
# Bytes of all answers.
_MOST_BYTES = 32 << 20
_TOKEN_BYTES = 4
# Bytes of an adapter's entry, without its tokens.
_ENTRY_BYTES = 1024
# Time without use after which answers are dropped, such as those of retired versions.
_UNUSED_S = 600.0
# Shorter answers are not kept.
_SHORTEST = 4
# Weight of the last answer in the acceptance.
_NEWEST = 1 / 4
Predicted = tuple[DraftSource, bool]
"""Kind of predicted token: source, and whether the source's token before it has come true. Tokens
of an MTP head and of a draft LoRA are of one kind: False.
"""

# Acceptance that is assumed until it is known.
_FIRST_ACCEPTANCE: dict[Predicted, float] = {
    (DraftSource.LOOKUP, False): 0.5,
    (DraftSource.LOOKUP, True): 0.8,
    (DraftSource.ANSWERS, False): 0.5,
    (DraftSource.ANSWERS, True): 0.8,
    (DraftSource.MTP, False): 0.6,
    (DraftSource.DRAFT, False): 0.6,
}

Key = tuple[str, str, str | None]
"""Tenant, salt and adapter digest (None for the base model) of requests."""


class AdapterAnswers:
    """Recent answers to one tenant with one adapter.

    tokens: answers, the latest last, each behind its prompt's last LEAD (3) tokens and before END
        (-1); never changed in place.
    acceptance: share of predicted tokens that came true, 0 to 1: a moving average over the answers,
        by kind of token.
    used_s: time of the last use, by the monotonic clock.
    """

    __slots__ = ("acceptance", "tokens", "used_s")

    def __init__(self) -> None:
        self.tokens: Tokens = np.empty(0, np.int32)
        self.used_s = 0.0
        self.acceptance = dict(_FIRST_ACCEPTANCE)

    @property
    def nbytes(self) -> int:
        """Bytes that the answers take."""
        return _ENTRY_BYTES + _TOKEN_BYTES * len(self.tokens)

    def add(self, lead: Sequence[int], answer: Sequence[int]) -> None:
        """Append an answer; drop the oldest tokens beyond _ADAPTER_TOKENS (8192).

        Answers of fewer than 4 tokens are not kept.

        lead: last tokens of the answer's prompt.
        """
        if len(answer) >= _SHORTEST:
            added = np.array([*lead, *answer, END], np.int32)
            self.tokens = np.concatenate([self.tokens, added])[-_ADAPTER_TOKENS:].copy()

    def record(self, predicted: Predicted, acceptance: float) -> None:
        """Include the share of an answer's predicted tokens that came true in `acceptance`.

        predicted: kind of the predicted tokens.
        acceptance: the share, 0 to 1.
        """
        self.acceptance[predicted] += _NEWEST * (acceptance - self.acceptance[predicted])


class RecentAnswers:
    """Recent answers of all adapters, within a number of bytes. For the engine's thread only.

    If the bytes exceed the bound, the answers of the adapter that was used least recently are
    dropped; so are answers unused for ten minutes.

    nbytes: bytes of all answers.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes, self.nbytes = most_bytes, 0
        self._kept: dict[Key, AdapterAnswers] = {}  # the last used last

    def of(self, key: Key) -> AdapterAnswers:
        """Return the recent answers of a tenant's adapter, at first none; counts as a use.

        key: tenant, salt and adapter digest.
        """
        answers = self._kept.pop(key, None)
        if answers is None:
            answers = AdapterAnswers()
            self.nbytes += answers.nbytes
        self._kept[key] = answers
        answers.used_s = time.monotonic()
        self._drop(answers.used_s)
        return answers

    def add(self, key: Key, prompt: Sequence[int], answer: Sequence[int]) -> AdapterAnswers:
        """Append an answer to the answers of a tenant's adapter; return them.

        key: tenant, salt and adapter digest.
        prompt: the answer's prompt, of which only the last LEAD (3) tokens are kept.
        """
        answers = self.of(key)
        self.nbytes -= answers.nbytes
        answers.add(prompt[-LEAD:], answer)
        self.nbytes += answers.nbytes
        self._drop(answers.used_s)
        return answers

    def forget_adapter(self, digest: str) -> None:
        """Drop the answers of an adapter, whoever has used it."""
        for key in [key for key in self._kept if key[2] is not None and digest in key[2]]:
            self._forget(key)

    def _drop(self, now_s: float) -> None:
        while len(self._kept) > 1:
            key = next(iter(self._kept))
            if self.nbytes <= self._most_bytes and self._kept[key].used_s >= now_s - _UNUSED_S:
                return
            self._forget(key)

    def _forget(self, key: Key) -> None:
        answers = self._kept.pop(key)
        self.nbytes -= answers.nbytes
        answers.tokens = answers.tokens[:0].copy()  # sequences may still hold the object
