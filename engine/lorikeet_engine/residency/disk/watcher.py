"""Thread that locks pinned files of the disk cache, and finds changes by other processes.

If other processes exceed the cache's budget, the thread lets the cache evict files.
"""

import logging
import threading

from lorikeet_engine.residency.changes import ResidencyChanges
from lorikeet_engine.residency.disk.cache import DiskCache

log = logging.getLogger(__name__)

_POLL_S = 1.0


class DiskWatcher:
    """Thread that looks at the disk cache's folder once a second, since the file system may block.

    Each time it locks the files of pinned adapters, records adapters that other processes have
    added or removed, and evicts files if the folder exceeds its budget. It logs errors of the file
    system and tries again.
    """

    def __init__(self, disk: DiskCache, changes: ResidencyChanges) -> None:
        """Record all adapters that are on the disk already, and start the thread.

        changes: records adapters that come to the disk or leave it.
        """
        self._disk, self._changes = disk, changes
        self._closed = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="lorikeet-disk-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop checking, and end the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            try:
                self._look()
            except OSError as error:  # the next look may succeed
                log.warning("disk_not_looked_at", extra={"error": str(error)})

    def _look(self) -> None:
        self._disk.apply_pins()
        digests = self._disk.changed()
        if digests is not None:
            self._changes.on_disk(digests)
        self._disk.trim()
