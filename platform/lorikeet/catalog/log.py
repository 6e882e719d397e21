"""The append-only log: one numbered object for each commit, written if absent.

That write is the only commit point. Numbers have no gaps, because a writer takes number n + 1
only after it has read number n.
"""

import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lorikeet.catalog.changes import Change, Entry, entry_from_json, entry_to_json
from lorikeet.catalog.store import ObjectStore
from lorikeet.errors import Conflict, ObjectNotFound, StoreError

_KEY = re.compile(r"log/([0-9]{12})\.json")
_READERS = 16


class Log:
    """The log in one store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

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
        try:
            self._store.put_if_absent(key, entry_to_json(entry))
        except StoreError as error:  # perhaps only the answer to our own success was lost
            if self._read_back(key, error).nonce != entry.nonce:
                raise Conflict(f"{key} was written by someone else first") from error
        return entry

    def read(self, after: int) -> list[Entry]:
        """Every entry after that number, in order: one LIST, then the objects in parallel.

        Raises StoreError, also when entry `after` is gone: an emptied store has no news.
        """
        listed = self._store.list("log/", _key(after - 1) if after else "")
        found = {int(match[1]) for match in map(_KEY.fullmatch, listed) if match}
        if after and after not in found:
            raise StoreError(f"{self._store.url}: {_key(after)} is gone: restore the log")
        last = max(found, default=after)
        numbers = range(after + 1, last + 1)
        if len(numbers) <= 1:
            return [self._get(seq) for seq in numbers]
        with ThreadPoolExecutor(min(_READERS, len(numbers))) as readers:
            return list(readers.map(self._get, numbers))

    def _get(self, seq: int) -> Entry:
        key = _key(seq)
        try:
            return entry_from_json(self._store.get(key), key)
        except ObjectNotFound as error:
            raise StoreError(
                f"{self._store.url}: {key} is missing although later entries exist: restore it"
            ) from error

    def _read_back(self, key: str, error: StoreError) -> Entry:
        try:
            return entry_from_json(self._store.get(key), key)
        except ObjectNotFound:
            raise error from None


def _key(seq: int) -> str:
    return f"log/{seq:012d}.json"
