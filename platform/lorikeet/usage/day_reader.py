"""Incremental reader of the usage objects of one day, to which writers still add."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import date
from typing import Generic, TypeVar

from lorikeet.catalog.store.object_store import ObjectStore, in_parallel
from lorikeet.errors import ObjectNotFound, StoreError
from lorikeet.usage.ledger import UsageAccount, UsageCounts, add_to
from lorikeet.usage.object_format import (
    UsageContent,
    UsageObjectId,
    compacted_number,
    day_prefix,
    from_json,
    object_id,
    object_prefix,
)

K = TypeVar("K")

_ATTEMPTS = 5
_BACK_S = 120.0
"""Assumed maximum delay, in seconds, from the time in an object's name to its write."""


class DayReader(Generic[K]):
    """Reader of one day's usage, which reads each object once and keeps sums. Single thread.

    A writer is a process, which numbers its objects of the day from 0. A compacted object has the
    usage of many objects.

    key: maps an account to the key of its sum.
    sums: usage read so far, by key.
    marks: number of the last object read, by writer's id.
    compacted: number of the newest compacted object that was read; None if none was.
    objects: number of objects read in addition to the compacted object.
    """

    def __init__(self, store: ObjectStore, day: date, key: Callable[[UsageAccount], K]) -> None:
        self.day = day
        self._store, self._key = store, key
        self._restart()

    def read(self) -> dict[K, UsageCounts]:
        """Read every new object of the day and return the sums. Raises StoreError."""
        return self._retry("")

    def read_new(self, now: float) -> dict[K, UsageCounts]:
        """Read new objects made in the last minutes and return the sums; cheaper than `read`.

        Lists older objects only if a writer's numbers show a gap. An object that was written much
        later than it was made is missed until its writer's next object, or until `read`.

        now: Unix seconds.

        Raises StoreError.
        """
        return self._retry(object_prefix(self.day, now - _BACK_S) if self._whole else "")

    def _restart(self) -> None:
        self.sums: dict[K, UsageCounts] = {}
        self.marks: dict[str, int] = {}
        self.compacted: int | None = None
        self.objects = 0
        self._whole = False

    def _retry(self, start_after: str) -> dict[K, UsageCounts]:
        for _ in range(_ATTEMPTS):
            try:
                if self._read(start_after):
                    self._whole = True
                    return self.sums
            except ObjectNotFound:  # compacted and deleted since the listing
                self._restart()
            start_after = ""
        raise StoreError(f"{self._store.url}: {day_prefix(self.day)} changes too fast to be read")

    def _read(self, start_after: str) -> bool:
        """Add new objects with keys after `start_after` to the sums.

        Returns False if the sums lack objects with earlier keys, so that all must be listed again.
        """
        keys = list(self._store.list(day_prefix(self.day), start_after))
        compacted = {number: key for key in keys if (number := compacted_number(key))}
        newest = max(compacted, default=None)
        if newest is not None and (self.compacted is None or newest > self.compacted):
            self._begin(newest, compacted[newest])
            if start_after:
                return False
        found = {written: key for key in keys if (written := object_id(key))}
        following, missed = self._following(found)
        for content in self._contents([found[written] for written in following]):
            self._add(content)
        self.marks.update(following)  # in order, so that each writer's last number stays
        self.objects += len(following)
        return not (missed and start_after)

    def _begin(self, number: int, key: str) -> None:
        content = from_json(self._store.get(key), key)
        self._restart()
        self._add(content)
        self.marks, self.compacted = dict(content.marks), number

    def _following(self, found: Iterable[UsageObjectId]) -> tuple[list[UsageObjectId], bool]:
        """Return the unread objects that follow each writer's mark without a gap, and whether any
        writer has a gap.

        The mark of a writer is the number of its last object that was read.
        """
        numbers = defaultdict(set)
        for written in found:
            numbers[written.writer].add(written.number)
        following = []
        missed = False
        for writer, there in numbers.items():
            number = self.marks[writer] + 1 if writer in self.marks else 0
            while number in there:
                following.append(UsageObjectId(writer, number))
                number += 1
            missed = missed or max(there) >= number
        return following, missed

    def _contents(self, keys: list[str]) -> list[UsageContent]:
        def get(key: str) -> UsageContent:
            return from_json(self._store.get(key), key)

        return in_parallel(get, keys)

    def _add(self, content: UsageContent) -> None:
        for account, counts in content.use.items():
            add_to(self.sums, self._key(account), counts)
