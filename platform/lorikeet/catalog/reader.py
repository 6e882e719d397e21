"""Reading a catalog: a snapshot, the log's tail, and new entries as they come."""

import threading
from collections.abc import Callable, Collection
from typing import TypeVar

from lorikeet.catalog.history import History
from lorikeet.catalog.log.log import Log
from lorikeet.catalog.snapshots.partitions import PartitionsNotRead, UnreadPartition
from lorikeet.catalog.snapshots.snapshots import Snapshots
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.catalog.view import CatalogView
from lorikeet.errors import ObjectNotFound, StoreError

SNAPSHOT_EVERY = 256
"""Entries between snapshots: two blocks of the log for a reader that starts."""

T = TypeVar("T")


class CatalogReader:
    """The catalog in one store, for any number of threads; empty until the first refresh."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._log = Log(store)
        self._snapshots = Snapshots(store)
        self._view = CatalogView(self._snapshots)
        self._snapshot_seq = 0  # of the newest snapshot known here
        self._asked_seq = 0  # when a newer one was last asked for
        self._reading = threading.Lock()

    @property
    def state(self) -> CatalogState:
        """The state as last read, some of its partitions perhaps unread; never blocks."""
        return self._view.state

    def ask(self, question: Callable[[CatalogState], T]) -> T:
        """Return a question's answer by the state as last read; reads the partitions it needs.

        Raises StoreError.
        """
        while True:
            try:
                return question(self.state)
            except PartitionsNotRead as missing:
                self.read(missing.numbers)

    def read(self, numbers: Collection[int]) -> None:
        """Read these partitions, which a question of the state needed. Raises StoreError."""
        try:
            self._view.read(numbers)
        except ObjectNotFound:  # of a snapshot so old that it was collected
            self.refresh()
            with self._reading:
                self._rebase()
            self._view.read(numbers)

    def refresh(self) -> CatalogState:
        """Read what was appended since, and return the new state. Raises StoreError."""
        with self._reading:
            if self.state.seq == 0:
                self._begin()
            self._view.advance(self._log.read(self.state.seq))
            if self.state.seq >= max(self._snapshot_seq, self._asked_seq) + 2 * SNAPSHOT_EVERY:
                self._rebase()
        if self.state.seq == 0:
            raise StoreError(f"there is no catalog at {self.store.url}: run `lorikeet init` first")
        return self.state

    @property
    def history(self) -> History:
        """The catalog's history up to the state as last read."""
        return History(self._log, self._snapshots, self.state.seq)

    @property
    def snapshot_due(self) -> bool:
        """Whether so much was appended since the newest snapshot that another is worth making."""
        return self.state.seq >= self._snapshot_seq + SNAPSHOT_EVERY

    def snapshot(self) -> int:
        """Make a snapshot, unless there is one of the newest entry; the number of that entry.

        Anybody may, at any time, while others write and make snapshots. Raises StoreError.
        """
        self.refresh()
        manifest = self._snapshots.newest()
        if manifest is None or manifest.seq < self.state.seq:
            state = self.ask(_settled)
            manifest = self._snapshots.write(state)
            self._view.rebase(manifest, state)
        self._snapshot_seq = max(self._snapshot_seq, manifest.seq)
        return manifest.seq

    def _begin(self) -> None:
        manifest = self._snapshots.newest()
        if manifest is not None:
            self._view.begin(manifest)
            self._snapshot_seq = manifest.seq

    def _rebase(self) -> None:
        """Use the newest snapshot from here on: fewer entries are kept for unread partitions."""
        self._asked_seq = self.state.seq
        manifest = self._snapshots.newest()
        if manifest is not None and self._snapshot_seq < manifest.seq <= self.state.seq:
            self._view.rebase(manifest)
            self._snapshot_seq = manifest.seq


def _settled(state: CatalogState) -> CatalogState:
    """The state, once no unread partition has pending entries."""
    partitions = enumerate(state.partitions)
    pending = frozenset(
        at
        for at, partition in partitions
        if isinstance(partition, UnreadPartition) and partition.pending
    )
    if pending:
        raise PartitionsNotRead(pending)
    return state
