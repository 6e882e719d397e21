"""Usage records written as replicas do, on a clock of the test's own."""

from datetime import date

from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.usage.ledger import UsageAccount, UsageByAccount, UsageCounts, UsageLedger, add_to
from lorikeet.usage.reader import UsageReader
from lorikeet.usage.writer import UsageWriter

DAY_S = 86400.0
NOON = 1_795_348_800.0  # 22 November 2026, 12:00 UTC
TODAY = date(2026, 11, 22)
YESTERDAY = date(2026, 11, 21)
SUPPORT = UsageAccount("acme", "tiny", "acme/support")
BASE = UsageAccount("acme", "tiny")
GLOBEX = UsageAccount("globex", "tiny", "acme/support")


class Clock:
    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Replica:
    """A ledger and its writer; the test calls flush in place of the writer's thread."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self.ledger = UsageLedger(clock)
        self.writer = UsageWriter(store, self.ledger, 60.0, lambda: None, clock)

    def uses(self, account: UsageAccount, **counts: float) -> None:
        self.ledger.add(account, UsageCounts(**counts))

    def flush(self) -> bool:
        return self.writer.flush()


def total(
    store: ObjectStore, clock: Clock, first: date = TODAY, last: date = TODAY
) -> UsageByAccount:
    """Return the sum of all usage of the days from first to last, as a new reader finds it."""
    sums: dict[UsageAccount, UsageCounts] = {}
    for use in UsageReader(store, clock).read(first, last).values():
        for account, counts in use.items():
            add_to(sums, account, counts)
    return sums


def objects(store: ObjectStore) -> list[str]:
    return list(store.list("usage/"))
