"""One process's view of the catalog: a state that moves on, and parts that are read on demand."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from lorikeet.catalog.log.changes import Entry
from lorikeet.catalog.log.fold import fold, fold_part
from lorikeet.catalog.snapshots.partitions import NotRead, Partition, Unread
from lorikeet.catalog.snapshots.snapshots import Manifest, Snapshots
from lorikeet.catalog.state import CatalogState

T = TypeVar("T")


class CatalogView:
    """A state for any number of threads. What it shows only moves on.

    A part is read from the snapshot that it began with or was moved to; the entries since are
    kept until then.
    """

    def __init__(self, snapshots: Snapshots, state: CatalogState | None = None) -> None:
        self._snapshots = snapshots
        self._state = state or CatalogState()
        self._base_seq = self._state.seq  # of the snapshot that unread parts lie in
        self._changing = threading.Lock()  # held while computing, never while reading the store

    @property
    def state(self) -> CatalogState:
        """What is known; never blocks."""
        return self._state

    def ask(self, question: Callable[[CatalogState], T]) -> T:
        """The answer of a state no older than the one shown; reads the parts that it needs."""
        while True:
            try:
                return question(self._state)
            except NotRead as missing:
                self.read(missing.numbers)

    def read(self, numbers: Collection[int]) -> None:
        """Read these parts, if they are not read yet. Raises StoreError."""
        held = [self._state.parts[number] for number in numbers]
        parts = self._snapshots.read({part.digest for part in held if isinstance(part, Unread)})
        with self._changing:
            now = list(self._state.parts)
            for number in numbers:
                now[number] = _caught_up(now[number], number, parts)
            self._state = replace(self._state, parts=tuple(now))

    def advance(self, entries: Sequence[Entry]) -> None:
        """Move on by what is new among these entries, which leave no gap."""
        with self._changing:
            news = [entry for entry in entries if entry.seq > self._state.seq]
            if news:
                self._state = fold(self._state, news)

    def begin(self, manifest: Manifest) -> None:
        """Show this snapshot, before anything else was shown."""
        with self._changing:
            if self._state.seq == 0:
                self._state = manifest.state()
                self._base_seq = manifest.seq

    def rebase(self, manifest: Manifest, written: CatalogState | None = None) -> None:
        """From now on read parts from this snapshot, which covers no more than the state.

        written: the state that the snapshot was made of, if it was made here.
        """
        with self._changing:
            assert manifest.seq <= self._state.seq
            if manifest.seq < self._base_seq:
                return  # another thread came first, with a newer one
            self._base_seq = manifest.seq
            parts = list(map(partial(_rebased, manifest.seq), self._state.parts, manifest.parts))
            for number, part in enumerate(written.parts if written else ()):
                if part is parts[number] and isinstance(part, Partition):
                    parts[number] = replace(part, digest=manifest.parts[number])
            self._state = replace(self._state, parts=tuple(parts))


def _caught_up(
    part: Partition | Unread, number: int, read: Mapping[str, Partition]
) -> Partition | Unread:
    if not isinstance(part, Unread) or part.digest not in read:
        return part  # read by somebody else, or rebased meanwhile
    return fold_part(read[part.digest], number, part.pending) if part.pending else read[part.digest]


def _rebased(seq: int, part: Partition | Unread, digest: str) -> Partition | Unread:
    if not isinstance(part, Unread):
        return part
    return Unread(digest, tuple(entry for entry in part.pending if entry.seq > seq))
