"""One process's view of the catalog: a snapshot, the log's tail, and new entries as they come."""

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from lorikeet.catalog.log.apply import apply_entries, apply_to_partition
from lorikeet.catalog.log.changes import Entry
from lorikeet.catalog.log.log import Log
from lorikeet.catalog.snapshots.snapshots import Manifest, Snapshots
from lorikeet.catalog.state import CatalogState, Partition, PartitionsNotRead, UnreadPartition
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import NoCatalog, ObjectNotFound, StoreError

SNAPSHOT_EVERY = 256
"""Entries between snapshots: two blocks of the log for a reader that starts."""

T = TypeVar("T")


class CatalogView:
    """The newest state that this process knows, for any number of threads; it never goes back.

    Questions are functions of a CatalogState (state.py). A partition that one needs is read from
    the snapshot that the view began with or was rebased to; the entries since are kept until then.
    """

    def __init__(self, snapshots: Snapshots, state: CatalogState | None = None) -> None:
        self._snapshots = snapshots
        self._state = state or CatalogState()
        self._base_seq = self._state.seq  # of the snapshot that unread partitions lie in
        self._changing = threading.Lock()  # held while computing, never while reading the store

    @property
    def state(self) -> CatalogState:
        """The newest state, some of its partitions perhaps unread; never blocks."""
        return self._state

    def ask(self, question: Callable[[CatalogState], T]) -> T:
        """Return a question's answer by the newest state; reads the partitions it needs.

        Raises StoreError.
        """
        while True:
            try:
                return question(self._state)
            except PartitionsNotRead as missing:
                self.read(missing.numbers)

    def read(self, numbers: Collection[int]) -> None:
        """Read these partitions, if they are not read yet. Raises StoreError."""
        held = [self._state.partitions[number] for number in numbers]
        partitions = self._snapshots.read(
            {partition.digest for partition in held if isinstance(partition, UnreadPartition)}
        )
        with self._changing:
            now = list(self._state.partitions)
            for number in numbers:
                now[number] = _caught_up(now[number], number, partitions)
            self._state = replace(self._state, partitions=tuple(now))

    def advance(self, entries: Sequence[Entry]) -> None:
        """Apply those of these entries that are new; they leave no gap."""
        with self._changing:
            new = [entry for entry in entries if entry.seq > self._state.seq]
            if new:
                self._state = apply_entries(self._state, new)

    def begin(self, manifest: Manifest) -> None:
        """Show this snapshot, before anything else was shown."""
        with self._changing:
            if self._state.seq == 0:
                self._state = manifest.state()
                self._base_seq = manifest.seq

    def begin_with(self, state: CatalogState) -> None:
        """Show a state that was kept, before anything else was shown."""
        with self._changing:
            if self._state.seq == 0:
                self._state = state

    def rebase(self, manifest: Manifest, written: CatalogState | None = None) -> None:
        """From now on read partitions from this snapshot, which covers no more than the state.

        written: the state that the snapshot was made of, if it was made here.
        """
        with self._changing:
            assert manifest.seq <= self._state.seq
            if manifest.seq < self._base_seq:
                return  # another thread came first, with a newer one
            self._base_seq = manifest.seq
            partitions = list(
                map(partial(_rebased, manifest.seq), self._state.partitions, manifest.partitions)
            )
            for number, partition in enumerate(written.partitions if written else ()):
                if partition is partitions[number] and isinstance(partition, Partition):
                    partitions[number] = replace(partition, digest=manifest.partitions[number])
            self._state = replace(self._state, partitions=tuple(partitions))


class CatalogReader(CatalogView):
    """A view that follows the catalog in a store; empty until the first refresh."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(Snapshots(store))
        self.store = store
        self._log = Log(store)
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
        self.advance(self._log.read(self.state.seq))
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


def _caught_up(
    partition: Partition | UnreadPartition, number: int, read: Mapping[str, Partition]
) -> Partition | UnreadPartition:
    if not isinstance(partition, UnreadPartition) or partition.digest not in read:
        return partition  # read by somebody else, or rebased meanwhile
    return (
        apply_to_partition(read[partition.digest], number, partition.pending)
        if partition.pending
        else read[partition.digest]
    )


def _rebased(
    seq: int, partition: Partition | UnreadPartition, digest: str
) -> Partition | UnreadPartition:
    if not isinstance(partition, UnreadPartition):
        return partition
    return UnreadPartition(digest, tuple(entry for entry in partition.pending if entry.seq > seq))


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
