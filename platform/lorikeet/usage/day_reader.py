"""One day's usage, read from the store as it grows."""

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
"""A object may be written so long after another whose name says that it was made later."""


class DayReader(Generic[K]):
    """Reads each object once, and sums by what `key` makes of an account. For one thread.

    marks: the number of the last object read of each writer. compacted: the number of the compacted
    object that it began with, if there is one.
    """

    def __init__(self, store: ObjectStore, day: date, key: Callable[[UsageAccount], K]) -> None:
        self.day = day
        self._store, self._key = store, key
        self._restart()

    def read(self) -> dict[K, UsageCounts]:
        """All that is there. Raises StoreError."""
        return self._retry("")

    def read_new(self, now: float) -> dict[K, UsageCounts]:
        """Read like `read`, but look for objects made minutes before `now` only if one is missed.

        An object that was written much later than it was made is missed only until the next one of
        its writer, or `read`. Raises StoreError.
        """
        return self._retry(object_prefix(self.day, now - _BACK_S) if self._whole else "")

    def _restart(self) -> None:
        self.sums: dict[K, UsageCounts] = {}
        self.marks: dict[str, int] = {}
        self.compacted: int | None = None
        self.objects = 0  # read beside the compacted object
        self._whole = False

    def _retry(self, start_after: str) -> dict[K, UsageCounts]:
        for _ in range(_ATTEMPTS):
            try:
                if self._read(start_after):
                    self._whole = True
                    return self.sums
            except ObjectNotFound:  # it was compacted and deleted since it was listed
                self._restart()
            start_after = ""
        raise StoreError(f"{self._store.url}: {day_prefix(self.day)} changes too fast to be read")

    def _read(self, start_after: str) -> bool:
        """Read what is new among these; False if others that could be listed are missing."""
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
        self.marks.update(following)  # in order, so that each writer's last one stays
        self.objects += len(following)
        return not (missed and start_after)

    def _begin(self, number: int, key: str) -> None:
        content = from_json(self._store.get(key), key)
        self._restart()
        self._add(content)
        self.marks, self.compacted = dict(content.marks), number

    def _following(self, found: Iterable[UsageObjectId]) -> tuple[list[UsageObjectId], bool]:
        """Each writer's objects from the one after its mark on, and whether some are missing."""
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
