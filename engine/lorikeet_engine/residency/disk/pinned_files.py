"""The files of pinned adapters in the disk cache, each under a shared lock: nobody removes them."""

import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lorikeet_engine.residency.disk.usage import DiskUsage

log = logging.getLogger(__name__)


class _HeldFile(NamedTuple):
    """A file that is locked as long as the descriptor is open."""

    name: str
    descriptor: int


class PinnedFiles:
    """Which adapters are pinned, and the locks on their files.

    add and remove ask no file system, may be called from any thread and wait for nobody; apply and
    close, which do the work, from one.
    """

    def __init__(
        self, folder: Path, names: Callable[[str], tuple[str, ...]], usage: DiskUsage
    ) -> None:
        """names: of the files that an adapter may have, the best first."""
        self._folder, self._names, self._usage = folder, names, usage
        self._wanted: set[str] = set()
        self._held: dict[str, _HeldFile] = {}

    def add(self, digest: str) -> bool:
        """Lock a file of this adapter from the next `apply` on; whether one is locked now."""
        self._wanted.add(digest)
        held = self._held.get(digest)
        return held is not None and self._usage.holds(held.name)

    def remove(self, digest: str) -> None:
        """Unlock an adapter's file in the next `apply`."""
        self._wanted.discard(digest)

    def apply(self) -> None:
        """Lock the files of all that is pinned, as far as they are there, and unlock all others."""
        wanted = set(self._wanted)
        for digest, held in list(self._held.items()):
            # without a link it was an image, found damaged and removed
            if digest not in wanted or not os.fstat(held.descriptor).st_nlink:
                os.close(self._held.pop(digest).descriptor)
        for digest in wanted - self._held.keys():
            for path in (self._folder / name for name in self._names(digest)):
                descriptor = lock_file(path, fcntl.LOCK_SH)
                if descriptor is not None:
                    self._held[digest] = _HeldFile(path.name, descriptor)
                    self._usage.add(path)
                    break

    def close(self) -> None:
        """Unlock all; the files stay."""
        self._wanted.clear()
        self.apply()


def lock_file(path: Path, kind: int) -> int | None:
    """A descriptor that holds the lock, or None: taken by somebody, or the file is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:  # too many open files: a pin can wait, the engine must not stop
        log.warning("disk_file_not_locked", extra={"file": path.name, "error": str(error)})
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    except OSError as error:
        log.warning("disk_file_not_locked", extra={"file": path.name, "error": str(error)})
    os.close(descriptor)
    return None
