"""View of the catalog: a state whose partitions are read when a question needs them."""

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
    """A catalog state that only moves forward, entry by entry. Thread-safe.

    Questions are functions of a CatalogState (state.py). A partition (part of the state) that a
    question needs is read from a snapshot: the one that the view began with, or a newer one that
    `rebase` has set.
    """

    def __init__(self, snapshots: Snapshots, state: CatalogState | None = None) -> None:
        self._snapshots = snapshots
        self._state = state or CatalogState()
        self._base_seq = self._state.seq  # of the snapshot that holds the unread partitions
        self._changing = threading.Lock()  # held while computing, never while reading the store

    @property
    def state(self) -> CatalogState:
        """Newest state, perhaps with partitions that are not read yet. Never blocks."""
        return self._state

    def ask(self, question: Callable[[CatalogState], T]) -> T:
        """Answer a question from the newest state, reading the partitions that it needs.

        question: function of the state; called again after partitions were read.

        Raises StoreError if a partition cannot be read.
        """
        while True:
            try:
                return question(self._state)
            except PartitionsNotRead as missing:
                self.read(missing.numbers)

    def read(self, numbers: Collection[int]) -> None:
        """Read some partitions (parts of the state) from the store unless they are read already.

        numbers: numbers of the partitions, 0 to 256.

        Raises StoreError if the store cannot be read.
        """
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
        """Apply the given entries that are newer than the state.

        entries: consecutive log entries, in order.
        """
        with self._changing:
            new = [entry for entry in entries if entry.seq > self._state.seq]
            if new:
                self._state = apply_entries(self._state, new)

    def begin(self, manifest: Manifest) -> None:
        """Set the first state to that of a snapshot. Does nothing if there is a state already."""
        with self._changing:
            if self._state.seq == 0:
                self._state = manifest.state()
                self._base_seq = manifest.seq

    def begin_with(self, state: CatalogState) -> None:
        """Set the first state to one read from disk. Does nothing if there is a state already."""
        with self._changing:
            if self._state.seq == 0:
                self._state = state

    def rebase(self, manifest: Manifest, written: CatalogState | None = None) -> None:
        """Let partitions that are not read yet be read from a newer snapshot, when they are needed.

        manifest: description of that snapshot, which must not be newer than the state.
        written: state that the snapshot was made of; None if another process made the snapshot.
        """
        with self._changing:
            assert manifest.seq <= self._state.seq
            if manifest.seq < self._base_seq:
                return  # another thread has rebased to a newer snapshot
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
        return partition  # another thread has read or rebased it meanwhile
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
