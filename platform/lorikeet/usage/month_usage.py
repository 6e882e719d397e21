"""Usage of each tenant in the present month, refreshed incrementally."""

import time
from collections.abc import Callable, Mapping
from datetime import date

from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.usage.day_reader import DayReader
from lorikeet.usage.ledger import NOTHING, UsageCounts, add_to, day_of
from lorikeet.usage.reader import WHOLE_S, days


class MonthUsage:
    """Each tenant's usage of the present month, UTC, as far as recorded in the store.

    `of` is thread-safe; `refresh` may run in one thread at a time.
    """

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._days: dict[date, DayReader[str]] = {}
        self._whole_at: float | None = None
        self._use: Mapping[str, UsageCounts] = {}

    def of(self, tenant: str) -> UsageCounts:
        """Return a tenant's usage as of the last refresh; NOTHING (all zero) before the first."""
        return self._use.get(tenant, NOTHING)

    def refresh(self) -> None:
        """Read new usage, usually with one LIST. Raises StoreError and then keeps the old sums."""
        now = self._clock()
        today = day_of(now)
        month = days(today.replace(day=1), today)
        begun = {
            day: self._days.get(day)
            or DayReader(self._store, day, key=lambda account: account.tenant)
            for day in month
        }
        whole_at = self._whole_at if begun.keys() == self._days.keys() else None
        if whole_at is None or not 0 <= now - whole_at < WHOLE_S:  # clocks may go back
            for day in begun.values():
                day.read()
            self._whole_at = now
        else:
            begun[today].read_new(now)
        self._days = begun
        use: dict[str, UsageCounts] = {}
        for day in begun.values():
            for tenant, counts in day.sums.items():
                add_to(use, tenant, counts)
        self._use = use
