"""The catalog's append-only log: one numbered object for each entry, written if absent.

The conditional write is the only commit point. Numbers have no gaps, because a writer writes number
n + 1 only after it has read number n. Each object repeats the earlier entries of its block, so that
a reader fetches one object per block instead of one per entry.
"""

import logging
import re
import secrets
import threading
from collections.abc import Collection, Sequence

from lorikeet.catalog.changes import Change, Entry, schema_of
from lorikeet.catalog.log_format import object_from_json, object_to_json
from lorikeet.catalog.store.object_store import ObjectStore, in_parallel
from lorikeet.errors import Conflict, ObjectNotFound, StoreError, StoreRefused

log = logging.getLogger(__name__)

BLOCK = 128
"""Number of log entries in a block: entries with the same `seq // BLOCK` form a block."""

_KEY = re.compile(r"log/([0-9]{12})\.json")
_MOST_BYTES = 2**17
"""Limit on the bytes of an object. An object that would be larger omits the earlier entries."""


class Log:
    """The catalog's append-only log of changes, in one store. Thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._held: Sequence[Entry] = ()  # by the newest object read or written here
        self._holding = threading.Lock()
        self._overwritten: int | None = None  # number of an entry that the store has let change

    def append(self, after: int, actor: str, time: float, changes: Sequence[Change]) -> Entry:
        """Commit changes together as entry `after` + 1.

        after: number of the newest entry, on whose state the changes were decided.
        actor: author, for the audit trail.
        time: Unix seconds.

        Raises Conflict if another writer has taken that number, StoreError if the store failed and
        does not hold the entry, StoreRefused if an entry that this process has read was
        overwritten.
        """
        if self._overwritten is not None:
            raise StoreRefused(
                f"{self._store.url}: {_key(self._overwritten)} was overwritten after it was read: "
                "changes are lost. Let the store honour If-None-Match (`lorikeet doctor` checks "
                "this), compare `lorikeet log` with the changes that were made, and restart"
            )
        entry = Entry(
            seq=after + 1,
            nonce=secrets.token_hex(16),
            actor=actor,
            time=time,
            changes=tuple(changes),
            schema=schema_of(changes),
        )
        key = _key(entry.seq)
        entries: Sequence[Entry] = (*self._before(entry.seq), entry)
        data = object_to_json(entries)
        if len(data) > _MOST_BYTES:
            entries = (entry,)
            data = object_to_json(entries)
        try:
            self._store.put_if_absent(key, data)
        except StoreError as error:  # the write may have succeeded although its answer was lost
            if self._read_back(key, error).nonce != entry.nonce:
                raise Conflict(f"{key} was written by someone else first") from error
        self._hold(entries)
        return entry

    def read(self, after: int) -> list[Entry]:
        """Return every entry after entry `after`, in order: one LIST, then parallel GETs.

        Raises StoreError if the store cannot be read, or if entry `after` is missing: an emptied
        store must not look up to date.
        """
        listed = self._store.list("log/", _key(after - 1) if after else "")
        found = {int(match[1]) for match in map(_KEY.fullmatch, listed) if match}
        if after and after not in found:
            raise StoreError(f"{self._store.url}: {_key(after)} is gone: restore the log")
        return self.between(after, max(found, default=after))

    def between(self, after: int, last: int) -> list[Entry]:
        """Return the entries from `after` + 1 to `last`, in order.

        Raises StoreError if one of them is missing or cannot be read.
        """
        wanted = range(after + 1, last + 1)
        if not wanted:
            return []
        entries = self._get_all({min(seq | (BLOCK - 1), last) for seq in (*wanted[::BLOCK], last)})
        # an object that would exceed _MOST_BYTES repeats fewer entries than its block has
        entries |= self._get_all({seq for seq in wanted if seq not in entries})
        return [entries[seq] for seq in wanted]

    def _get_all(self, numbers: Collection[int]) -> dict[int, Entry]:
        """Return the entries in some of the log's objects, by entry number.

        numbers: numbers of the objects, each of which also repeats earlier entries.
        """
        objects = in_parallel(self._get, numbers)
        return {entry.seq: entry for entries in objects for entry in entries}

    def _get(self, seq: int) -> Sequence[Entry]:
        key = _key(seq)
        try:
            entries = object_from_json(self._store.get(key), key)
        except ObjectNotFound as error:
            raise StoreError(
                f"{self._store.url}: {key} is missing although later entries exist: restore it"
            ) from error
        self._hold(entries)
        return entries

    def _read_back(self, key: str, error: StoreError) -> Entry:
        try:
            return object_from_json(self._store.get(key), key)[-1]
        except ObjectNotFound:
            raise error from None

    def _before(self, seq: int) -> Sequence[Entry]:
        """Return the entries before entry `seq` in its block of BLOCK entries, for log object `seq`
        to repeat.
        """
        if seq % BLOCK == 0 or seq == 1:
            return ()
        held = self._held
        return held if held and held[-1].seq == seq - 1 else self._get(seq - 1)

    def _hold(self, entries: Sequence[Entry]) -> None:
        with self._holding:
            self._compare(entries)
            if not self._held or self._held[-1].seq < entries[-1].seq:
                self._held = entries

    def _compare(self, entries: Sequence[Entry]) -> None:
        """Log an error for the first of these entries that differs from the entry that this process
        read earlier under the same number: the log object was overwritten.
        """
        nonces = {entry.seq: entry.nonce for entry in self._held}
        for entry in entries:
            if self._overwritten is None and nonces.get(entry.seq, entry.nonce) != entry.nonce:
                self._overwritten = entry.seq
                log.error(
                    "log_entry_overwritten",
                    extra={"store": self._store.url, "entry": _key(entry.seq)},
                )


def _key(seq: int) -> str:
    return f"log/{seq:012d}.json"
