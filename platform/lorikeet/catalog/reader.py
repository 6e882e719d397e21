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
"""Number of log entries between two snapshots; a starting reader reads at most two blocks of the
log.
"""


class CatalogReader(CatalogView):
    """View of the catalog in a store, which `refresh` brings up to date. Thread-safe.

    Empty until the first refresh.
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(Snapshots(store))
        self.store = store
        self.log = Log(store)
        self._snapshot_seq = 0  # of the newest snapshot that this reader knows
        self._asked_seq = 0  # state's seq at the last request for a newer snapshot
        self._reading = threading.Lock()
        self._failure: StoreError | None = None  # of the last refresh, if it failed
        self._failed_s = -math.inf

    def read(self, numbers: Collection[int]) -> None:
        """Read some partitions (parts of the state) from the store unless they are read already.

        numbers: numbers of the partitions, 0 to 256.

        Raises StoreError if the store cannot be read.
        """
        try:
            super().read(numbers)
        except ObjectNotFound:  # the snapshot was garbage collected: use the newest
            self.refresh()
            with self._reading:
                self._rebase()
            super().read(numbers)

    def refresh(self, asked_s: float | None = None) -> CatalogState:
        """Read the entries appended since the last refresh, and return the new state.

        Concurrent callers share a failure: if another refresh has failed since `asked_s`, this call
        fails without asking the store.

        asked_s: time.monotonic() of the caller's request; None: now.

        Raises StoreError if the store cannot be read, NoCatalog if it holds no catalog.
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
        """History of the catalog up to the last refresh."""
        return History(self.log, self._snapshots, self.state.seq)

    @property
    def snapshot_due(self) -> bool:
        """Whether SNAPSHOT_EVERY entries have been appended since the newest snapshot."""
        return self.state.seq >= self._snapshot_seq + SNAPSHOT_EVERY

    def snapshot(self) -> int:
        """Make a snapshot of the state after the newest log entry, if there is none.

        Return the entry's number.

        Safe at any time in any process, also while others append and make snapshots.
        Raises StoreError if the store fails.
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
        """Let partitions that are not read yet be read from the newest snapshot, if it is newer
        than this reader's.
        """
        self._asked_seq = self.state.seq
        manifest = self._snapshots.newest()
        if manifest is not None and self._snapshot_seq < manifest.seq <= self.state.seq:
            self.rebase(manifest)
            self._snapshot_seq = manifest.seq


def _settled(state: CatalogState) -> CatalogState:
    """Return the state if it can be written as a snapshot; else raise PartitionsNotRead.

    The error names the partitions to read first: log entries have changed them since they were
    stored, and are applied once they are read.
    """
    partitions = enumerate(state.partitions)
    pending = frozenset(
        at
        for at, partition in partitions
        if isinstance(partition, UnreadPartition) and partition.pending
    )
    if pending:
        raise PartitionsNotRead(pending)
    return state
