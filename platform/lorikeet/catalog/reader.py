"""Reader of the catalog in a store: a view that follows the log."""

import math
import threading
import time
from collections.abc import Collection

from lorikeet.catalog.history import History
from lorikeet.catalog.log import Log
from lorikeet.catalog.snapshots import Snapshots
from lorikeet.catalog.state import CatalogState, PartitionsNotRead, UnreadPartition
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.catalog.view import CatalogView
from lorikeet.errors import NoCatalog, ObjectNotFound, StoreError

SNAPSHOT_EVERY = 256
"""Entries between snapshots: two blocks of the log for a reader that starts."""


class CatalogReader(CatalogView):
    """A view that follows the catalog in a store; empty until the first refresh."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(Snapshots(store))
        self.store = store
        self.log = Log(store)
        self._snapshot_seq = 0  # of the newest snapshot known here
        self._asked_seq = 0  # when a newer one was last asked for
        self._reading = threading.Lock()
        self._failure: StoreError | None = None  # of the last refresh that failed
        self._failed_s = -math.inf

    def read(self, numbers: Collection[int]) -> None:
        """Read these partitions, if they are not read yet. Raises StoreError."""
        try:
            super().read(numbers)
        except ObjectNotFound:  # of a snapshot so old that it was collected
            self.refresh()
            with self._reading:
                self._rebase()
            super().read(numbers)

    def refresh(self, asked_s: float | None = None) -> CatalogState:
        """Read what was appended since, and return the new state. Raises StoreError.

        asked_s: when the caller was asked, by time.monotonic(). A store that has failed another
        refresh since then is not asked again: callers that wait for each other fail together.
        """
        asked_s = time.monotonic() if asked_s is None else asked_s
        with self._reading:
            if self._failure is not None and self._failed_s > asked_s:
                raise StoreError(self._failure.message) from self._failure
            try:
                self._catch_up()
            except StoreError as error:
                self._failure, self._failed_s = error, time.monotonic()
                raise
            self._failure = None
        if self.state.seq == 0:
            raise NoCatalog(f"there is no catalog at {self.store.url}: run `lorikeet init` first")
        return self.state

    @property
    def history(self) -> History:
        """The catalog's history up to the state as last read."""
        return History(self.log, self._snapshots, self.state.seq)

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
            self.rebase(manifest, state)
        self._snapshot_seq = max(self._snapshot_seq, manifest.seq)
        return manifest.seq

    def _catch_up(self) -> None:
        if self.state.seq == 0:
            self._begin()
        self.advance(self.log.read(self.state.seq))
        if self.state.seq >= max(self._snapshot_seq, self._asked_seq) + 2 * SNAPSHOT_EVERY:
            self._rebase()

    def _begin(self) -> None:
        manifest = self._snapshots.newest()
        if manifest is not None:
            self.begin(manifest)
            self._snapshot_seq = manifest.seq

    def _rebase(self) -> None:
        """Use the newest snapshot from here on: fewer entries are kept for unread partitions."""
        self._asked_seq = self.state.seq
        manifest = self._snapshots.newest()
        if manifest is not None and self._snapshot_seq < manifest.seq <= self.state.seq:
            self.rebase(manifest)
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
