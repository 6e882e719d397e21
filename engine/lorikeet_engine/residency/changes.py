"""Which adapters have moved: what one reader must be told to know where all of them are."""

import threading
from collections.abc import Callable, Set

from lorikeet_engine.adapter import Residency

OnChange = Callable[[str], None]
"""Called with the digest of an adapter that a tier holds from now on, or no longer."""


def ignore_change(_digest: str) -> None:
    """Do nothing: the default of a tier whose changes have no reader."""


class ResidencyChanges:
    """Digests that came to a tier or left one since the reader last asked. Thread-safe.

    Only that something happened is noted. Where the adapter is, is looked up when the reader asks,
    so neither the order of notes matters nor that one comes twice.
    changed: set whenever there may be something to report.
    """

    def __init__(self, residency: Callable[[str], Residency]) -> None:
        self._residency = residency
        self._lock = threading.Lock()  # guards `_touched`; held for no longer than that takes
        self._touched: set[str] = set()
        self._reading = threading.Lock()  # guards `_reported`
        self._reported: dict[str, Residency] = {}  # nearer than remote, as far as was reported
        self.changed = threading.Event()

    def note(self, digest: str) -> None:
        """Remember that something has happened to this adapter, which can be seen by now."""
        with self._lock:
            self._touched.add(digest)
        self.changed.set()

    def on_disk(self, digests: Set[str]) -> None:
        """Note those of which the reader knows otherwise: the disk holds these and no others."""
        with self._reading:
            gone = {d for d, tier in self._reported.items() if tier is Residency.DISK} - digests
            changed = gone | (digests - self._reported.keys())
        if changed:
            with self._lock:
                self._touched |= changed
            self.changed.set()

    def moved(self) -> dict[str, Residency]:
        """Where adapters are now that were elsewhere when the reader last asked."""
        with self._reading:
            with self._lock:
                touched, self._touched = self._touched, set()
            moved = dict[str, Residency]()
            for digest in touched:
                tier = self._residency(digest)
                if tier is not self._reported.get(digest, Residency.REMOTE):
                    moved[digest] = tier
                    self._report(digest, tier)
            return moved

    def _report(self, digest: str, tier: Residency) -> None:
        if tier is Residency.REMOTE:
            del self._reported[digest]
        else:
            self._reported[digest] = tier
