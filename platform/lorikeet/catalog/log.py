"""The append-only log: one numbered object for each commit, written if absent.

That write is the only commit point. Numbers have no gaps, because a writer takes number n + 1
only after it has read number n. An object repeats the entries before its own that are of the same
block, so that a reader fetches one object for each block and not one for each entry.
"""

import re
import secrets
import threading
from collections.abc import Collection, Sequence

from lorikeet.catalog.changes import Change, Entry
from lorikeet.catalog.log_format import object_from_json, object_to_json
from lorikeet.catalog.store.object_store import ObjectStore, in_parallel
from lorikeet.errors import Conflict, ObjectNotFound, StoreError

BLOCK = 128
"""Entries of a block: those with the same seq // BLOCK."""

_KEY = re.compile(r"log/([0-9]{12})\.json")
_MOST_BYTES = 2**17
"""The size above which an object repeats no earlier entries."""


class Log:
    """The log in one store, for any number of threads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._held: Sequence[Entry] = ()  # the newest object that was read or written
        self._holding = threading.Lock()

    def append(self, after: int, actor: str, time: float, changes: Sequence[Change]) -> Entry:
        """Commit these changes, together, as entry `after` + 1.

        time: Unix seconds. Raises Conflict when someone else took that number first, StoreError
        when the store failed and holds no such entry.
        """
        entry = Entry(
            seq=after + 1,
            nonce=secrets.token_hex(16),
            actor=actor,
            time=time,
            changes=tuple(changes),
        )
        key = _key(entry.seq)
        entries: Sequence[Entry] = (*self._before(entry.seq), entry)
        data = object_to_json(entries)
        if len(data) > _MOST_BYTES:
            entries = (entry,)
            data = object_to_json(entries)
        try:
            self._store.put_if_absent(key, data)
        except StoreError as error:  # perhaps only the answer to our own success was lost
            if self._read_back(key, error).nonce != entry.nonce:
                raise Conflict(f"{key} was written by someone else first") from error
        self._hold(entries)
        return entry

    def read(self, after: int) -> list[Entry]:
        """Every entry after that number, in order: one LIST, then the objects in parallel.

        Raises StoreError, also when entry `after` is gone: an emptied store has no news.
        """
        listed = self._store.list("log/", _key(after - 1) if after else "")
        found = {int(match[1]) for match in map(_KEY.fullmatch, listed) if match}
        if after and after not in found:
            raise StoreError(f"{self._store.url}: {_key(after)} is gone: restore the log")
        return self.between(after, max(found, default=after))

    def between(self, after: int, last: int) -> list[Entry]:
        """The entries after that number up to `last`, which is there. Raises StoreError."""
        wanted = range(after + 1, last + 1)
        if not wanted:
            return []
        entries = self._get_all({min(seq | (BLOCK - 1), last) for seq in (*wanted[::BLOCK], last)})
        # an object that would be too large repeats less than its block
        entries |= self._get_all({seq for seq in wanted if seq not in entries})
        return [entries[seq] for seq in wanted]

    def _get_all(self, numbers: Collection[int]) -> dict[int, Entry]:
        """What these objects hold, by number."""
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
        """What object `seq` is to repeat: what object `seq` - 1 holds of the same block."""
        if seq % BLOCK == 0 or seq == 1:
            return ()
        held = self._held
        return held if held and held[-1].seq == seq - 1 else self._get(seq - 1)

    def _hold(self, entries: Sequence[Entry]) -> None:
        with self._holding:
            if not self._held or self._held[-1].seq < entries[-1].seq:
                self._held = entries


def _key(seq: int) -> str:
    return f"log/{seq:012d}.json"
