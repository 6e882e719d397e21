"""What one gateway's requests met in the last minutes, second by second."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

from lorikeet.api.request_record import RequestRecord
from lorikeet_engine.adapter import Residency

SPAN_S = 180
"""So many seconds are told."""
WINDOW_S = 5
"""Each point of a line is of so many seconds: one alone has few requests, quantiles fewer."""

CAME, REFUSED, FAILED, LOOKED, HIT = "came", "refused", "failed", "looked", "hit"
Second = Counter[str | int]
"""How often what happened in one second: the names above, and as integers the buckets of times to
first token."""

_LEAST_S = 1e-4
_PER_OCTAVE = 8  # buckets: quantiles are right to 5%


class Recent:
    """Counts requests that are over. For one event loop."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, Second] = defaultdict(Counter)

    def ended(self, record: RequestRecord) -> None:
        """One is over: a listener of Explanations."""
        _count(record, self._seconds)
        if len(self._seconds) > 2 * (SPAN_S + WINDOW_S):
            since = time.time() - SPAN_S - WINDOW_S
            for at in [at for at in self._seconds if at < since]:
                del self._seconds[at]

    def seconds(self, running: Iterable[RequestRecord]) -> dict[int, Second]:
        """By Unix second. running: requests that are not over, which count as far as they are."""
        since = time.time() - SPAN_S - WINDOW_S
        seconds = defaultdict(Counter, {t: s.copy() for t, s in self._seconds.items() if t > since})
        for record in running:
            _count(record, seconds)
        return dict(seconds)


def quantile_s(second: Second, share: float) -> float | None:
    """Of its times to first token; None without any."""
    buckets = sorted((at, times) for at, times in second.items() if isinstance(at, int) and times)
    left = share * sum(times for _, times in buckets)
    for bucket, times in buckets:
        left -= times
        if left <= 0:
            return _LEAST_S * math.exp2((bucket - 0.5) / _PER_OCTAVE)
    return None


def _count(record: RequestRecord, seconds: defaultdict[int, Second]) -> None:
    """Each thing in the second in which it happened."""

    def happened(after_s: float, what: str | int) -> None:
        seconds[int(record.came + after_s)][what] += 1

    happened(0.0, CAME)
    end = record.outcome
    if end in (REFUSED, FAILED):
        happened(record.until_s, end)
    if record.residency is not None and record.found_s is not None:
        happened(record.found_s, LOOKED)
        if record.residency is Residency.GPU:
            happened(record.found_s, HIT)
    if (first_s := record.first_token_s) is not None:
        happened(first_s, _bucket(first_s))


def _bucket(duration_s: float) -> int:
    return math.ceil(_PER_OCTAVE * math.log2(max(duration_s, _LEAST_S) / _LEAST_S))
