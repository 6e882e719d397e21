"""Who is there: a replica that misses one answer is not gone."""

import time
from collections.abc import Callable, Iterable

from lorikeet.placement.report import ReplicaReport


class RollCall:
    """The last report of every replica that answered within `patience_s`.

    Without patience, one late answer would move a replica's pins to others and back again.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._last: dict[str, tuple[float, ReplicaReport]] = {}

    def answered(self, reports: Iterable[ReplicaReport]) -> list[ReplicaReport]:
        """Take these answers in; the reports of all who count as there, by name."""
        now_s = self._clock()
        self._last.update((report.replica, (now_s, report)) for report in reports)
        for replica, (heard_s, _) in list(self._last.items()):
            if now_s - heard_s > self._patience_s:
                del self._last[replica]
        return [self._last[replica][1] for replica in sorted(self._last)]
