"""Which adapters have moved: what one reader must be told to know where all of them are."""

import threading
from collections.abc import Callable, Set

from lorikeet_engine.adapter import Residency

Note = Callable[[str], None]


def unnoted(_digest: str) -> None:
    """For a tier whose changes nobody wants to know."""


class Journal:
    """Digests that came to a tier or left one since the reader was last told. Thread-safe.

    Only that something happened is noted. Where the adapter is, is looked up when the reader is
    told, so neither the order of notes matters nor that one comes twice.
    noted: set whenever there may be something to tell.
    """

    def __init__(self, residency: Callable[[str], Residency]) -> None:
        self._residency = residency
        self._lock = threading.Lock()  # guards `_touched`; held for no longer than that takes
        self._touched: set[str] = set()
        self._reading = threading.Lock()  # guards `_told`
        self._told: dict[str, Residency] = {}  # what is nearer than remote, as far as was told
        self.noted = threading.Event()

    def note(self, digest: str) -> None:
        """Something has happened to this adapter, and can be seen by now."""
        with self._lock:
            self._touched.add(digest)
        self.noted.set()

    def on_disk(self, digests: Set[str]) -> None:
        """The disk holds these and no others: note those of which the reader knows otherwise."""
        with self._reading:
            gone = {d for d, tier in self._told.items() if tier is Residency.DISK} - digests
            changed = gone | (digests - self._told.keys())
        if changed:
            with self._lock:
                self._touched |= changed
            self.noted.set()

    def moved(self) -> dict[str, Residency]:
        """Where adapters are now that were elsewhere when the reader was last told."""
        with self._reading:
            with self._lock:
                touched, self._touched = self._touched, set()
            moved = dict[str, Residency]()
            for digest in touched:
                tier = self._residency(digest)
                if tier is not self._told.get(digest, Residency.REMOTE):
                    moved[digest] = tier
                    self._tell(digest, tier)
            return moved

    def _tell(self, digest: str, tier: Residency) -> None:
        if tier is Residency.REMOTE:
            del self._told[digest]
        else:
            self._told[digest] = tier
