"""Reader of usage over a period of days."""

import math
import time
from collections.abc import Callable
from datetime import date, timedelta
from threading import Lock

from lorikeet.catalog.store.object_store import ObjectStore, in_parallel
from lorikeet.errors import InvalidInput
from lorikeet.usage.day_reader import DayReader
from lorikeet.usage.ledger import UsageAccount, UsageByAccount, day_of

MOST_DAYS = 400
WHOLE_S = 900.0
"""Seconds between full reads of a day to which writers still add.

Full reads find objects that incremental reads missed because they arrived late, for example after
an outage of the store.
"""
_AT_ONCE = 8
_DAY_S = 86400.0


def days(first: date, last: date) -> list[date]:
    """List the days from first to last. Raises InvalidInput if last is before first, or the days
    are too many.
    """
    count = (last - first).days + 1
    if count < 1:
        problem = f"{first} is after {last}: want the first day, then the last"
        raise InvalidInput(problem, param="from")
    if count > MOST_DAYS:
        problem = f"{count} days from {first} to {last}: want {MOST_DAYS} at most"
        raise InvalidInput(problem, param="from")
    return [first + timedelta(days=n) for n in range(count)]


class UsageReader:
    """Reader of usage by day; days to which writers still add are read incrementally. Thread-safe.

    An object that was written much later than its key's time is missed for WHOLE_S seconds at most.
    """

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._lock = Lock()  # guards the attributes below
        self._growing: dict[date, DayReader[UsageAccount]] = {}
        self._whole_at: dict[date, float] = {}

    def read(self, first: date, last: date) -> dict[date, UsageByAccount]:
        """Return the usage of each day from first to last, without days that have no usage.

        Raises InvalidInput if last is before first or the days are too many, and StoreError.
        """
        wanted = days(first, last)
        found = in_parallel(self._read, wanted, _AT_ONCE)
        return {day: use for day, use in zip(wanted, found, strict=True) if use}

    def _read(self, day: date) -> UsageByAccount:
        now = self._clock()
        yesterday = day_of(now - _DAY_S)
        if day < yesterday:
            return self._new(day).read()
        with self._lock:
            for over in [each for each in self._growing if each < yesterday]:
                del self._growing[over], self._whole_at[over]
            whole_at = self._whole_at.get(day, -math.inf)
            if 0 <= now - whole_at < WHOLE_S:  # clocks may go back
                return dict(self._growing[day].read_new(now))
            growing = self._growing.setdefault(day, self._new(day))
            use = dict(growing.read())
            self._whole_at[day] = now
            return use

    def _new(self, day: date) -> DayReader[UsageAccount]:
        return DayReader(self._store, day, key=lambda account: account)
