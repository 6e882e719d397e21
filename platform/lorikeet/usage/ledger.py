"""What one process has counted and not written yet."""

import time
from collections.abc import Callable
from datetime import date
from threading import Lock

from lorikeet.usage.counts import UsageAccount, UsageByAccount, UsageCounts, add_to, day_of


class UsageLedger:
    """Sums by day and account. For any thread; clock: Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = Lock()
        self._days: dict[date, dict[UsageAccount, UsageCounts]] = {}

    def add(self, account: UsageAccount, counts: UsageCounts) -> None:
        """Add what was used now."""
        day = day_of(self._clock())
        with self._lock:
            add_to(self._days.setdefault(day, {}), account, counts)

    def take(self) -> dict[date, UsageByAccount]:
        """Everything since the call before."""
        with self._lock:
            taken, self._days = self._days, {}
        return dict(taken)
