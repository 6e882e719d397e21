"""Sees what other processes put into the disk cache that they share with this one, or remove."""

import threading

from lorikeet_engine.residency.disk.cache import DiskCache
from lorikeet_engine.residency.journal import Journal

_LOOK_S = 1.0


class DiskChanges:
    """Looks into the folder once a second, on a thread of its own: a listing can take a while."""

    def __init__(self, disk: DiskCache, journal: Journal) -> None:
        """Note everything that is there already, and begin to look."""
        self._disk, self._journal = disk, journal
        self._closed = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="lorikeet-disk-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        digests = self._disk.changed()
        if digests is not None:
            self._journal.on_disk(digests)
