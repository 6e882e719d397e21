"""History of the catalog: searches of the log, and views as of an earlier entry."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from lorikeet.catalog.changes import Change, Entry
from lorikeet.catalog.log import BLOCK, Log
from lorikeet.catalog.snapshots import Snapshots
from lorikeet.catalog.view import CatalogView
from lorikeet.errors import InvalidInput

_STRIDE = 16 * BLOCK
_MOST_READ = 10 * _STRIDE
"""Limit on the entries that a search reads for one page: about 160 log objects."""
_CLOCKS_DIFFER_S = 3600.0
"""Limit, in seconds, on the difference between the clocks of two writers. Each writer gives its
entries times by its own clock.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """Filter for changes; None matches any.

    name: name of an adapter; requires `tenant`.
    actor: author of the entry, such as a key's id.
    since: earliest time of an entry, Unix seconds.
    """

    tenant: str | None = None
    name: str | None = None
    actor: str | None = None
    since: float | None = None

    def matching(self, entry: Entry) -> Entry | None:
        """Return the entry with its matching changes only, or None if no change matches."""
        if self.actor not in (None, entry.actor):
            return None
        if self.since is not None and entry.time < self.since:
            return None
        changes = tuple(change for change in entry.changes if self._concerns(change))
        return replace(entry, changes=changes) if changes else None

    def _concerns(self, change: Change) -> bool:
        if self.tenant is None:
            return True
        if change.type == "tenant_created":
            return self.name is None and change.name == self.tenant
        if self.name not in (None, getattr(change, "name", None)):
            return False
        return getattr(change, "tenant", None) == self.tenant


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """Entries found, newest first.

    before: argument `before` of the search that returns the next page; None if there are no older
        entries.
    """

    entries: tuple[Entry, ...]
    before: int | None


class History:
    """Past of the catalog up to log entry `newest`: searches, and views as of an earlier entry."""

    def __init__(self, log: Log, snapshots: Snapshots, newest: int) -> None:
        self._log = log
        self._snapshots = snapshots
        self._newest = newest

    def find(self, wanted: HistoryQuery, limit: int, before: int | None = None) -> HistoryPage:
        """Return the newest matching entries before entry `before`, `limit` at most.

        A page may hold fewer entries, even none, although older entries match: search again with
        the page's `before` until that is None. Raises StoreError if the log cannot be read.
        """
        found: list[Entry] = []
        start = min(before or self._newest + 1, self._newest + 1)
        seq = start
        for entry in self._backwards(start):
            if wanted.since is not None and entry.time < wanted.since - _CLOCKS_DIFFER_S:
                return HistoryPage(tuple(found), None)
            seq = entry.seq
            if (kept := wanted.matching(entry)) is not None:
                found.append(kept)
            if len(found) == limit or start - seq >= _MOST_READ:
                break
        return HistoryPage(tuple(found), seq if seq > 1 else None)

    def as_of(self, seq: int) -> CatalogView:
        """Return a view of the catalog right after entry `seq`.

        Raises InvalidInput if there is no such entry, StoreError if the store cannot be read.
        """
        if not 1 <= seq <= self._newest:
            raise InvalidInput(f"as of {seq}: want an entry from 1 to {self._newest}")
        manifest = self._snapshots.newest(up_to=seq)
        view = CatalogView(self._snapshots, manifest.state() if manifest else None)
        view.advance(self._log.between(view.state.seq, seq))
        return view

    def as_of_time(self, time: float) -> CatalogView:
        """Return a view of the catalog at a time, Unix seconds, by the clocks of its writers.

        Raises InvalidInput if the catalog was made later, StoreError if the store cannot be read.
        """
        first, last = 0, self._newest  # entry `first` was written by then, entry `last` + 1 was not
        while first < last:
            middle = (first + last + 1) // 2
            (entry,) = self._log.between(middle - 1, middle)
            first, last = (middle, last) if entry.time <= time else (first, middle - 1)
        if first == 0:
            (entry,) = self._log.between(0, 1)
            begun = datetime.fromtimestamp(entry.time, tz=UTC).isoformat(timespec="seconds")
            raise InvalidInput(f"there was no catalog then: it was made at {begun}")
        return self.as_of(first)

    def _backwards(self, before: int) -> Iterator[Entry]:
        """Yield every log entry before entry `before`, newest first."""
        more = 0
        while before > 1:
            after = max((before - 1) // BLOCK * BLOCK - more, 1) - 1
            yield from reversed(self._log.between(after, before - 1))
            before = after + 1
            more = _STRIDE - BLOCK
