"""One process's view of the catalog: a snapshot, the log's tail, and new entries as they come."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from lorikeet.catalog.apply import apply_entries, apply_to_partition
from lorikeet.catalog.changes import Entry
from lorikeet.catalog.snapshots import Manifest, Snapshots
from lorikeet.catalog.state import CatalogState, Partition, PartitionsNotRead, UnreadPartition

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
