"""Index of the files in a disk cache's folder. The size of a known file is not read again."""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

FILE = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{16})?")
"""Pattern of file names: a digest for a blob; a digest and a fingerprint for an image."""

# A change this soon after another can leave the folder's mtime as it was.
_SETTLED_NS = 100_000_000


class DiskIndex:
    """Files in a disk cache's folder, as of the last listing and this process's later changes.

    Only one thread may call `changed`; any thread may call the other methods. `holds` never blocks.

    adapters: number of adapters with a usable file, at the last listing.
    bytes: size of all files, at the last listing.
    """

    def __init__(self, folder: Path, usable: Callable[[str], bool]) -> None:
        """List the folder for the first time.

        usable: returns whether this process can use a file of this name.
        """
        self._folder, self._usable = folder, usable
        self._lock = threading.Lock()  # guards changes of _sizes
        self._sizes: dict[str, int] = {}
        self._listed_ns: int | None = None  # mtime of the folder; None: list it again
        self.adapters = self.bytes = 0
        self.changed()
        self._listed_ns = None  # so that the first reader's call lists everything

    def holds(self, name: str) -> bool:
        """Whether the folder has a file of this name, as far as this process knows."""
        return name in self._sizes

    def use(self, name: str) -> Path:
        """Mark the file with this name as used now, and return its path.

        Raises FileNotFoundError if the folder has no such file.
        """
        path = self._folder / name
        try:
            os.utime(path)
        except FileNotFoundError:  # another process may have removed it
            self.remove(name)
            raise
        except OSError as error:  # a full disk can still be read
            log.warning("disk_use_not_noted", extra={"file": name, "error": str(error)})
        self.add(path)  # another process may have added it
        return path

    def add(self, path: Path) -> None:
        """Record a file that this process has added or found."""
        if path.name not in self._sizes:
            with contextlib.suppress(FileNotFoundError):
                size = path.stat().st_size
                with self._lock:
                    self._sizes[path.name] = size

    def remove(self, name: str) -> None:
        """Record that this process has removed a file of this name, or found it missing."""
        with self._lock:
            self._sizes.pop(name, None)

    def changed(self) -> set[str] | None:
        """List the folder and return the digests of the adapters with a usable file.

        Returns None if the folder has not changed since the last call.
        """
        with self._lock:  # so that no file added after the listing counts as removed
            return self._list()

    def _list(self) -> set[str] | None:
        try:
            folder_ns = self._folder.stat().st_mtime_ns
            if folder_ns == self._listed_ns:
                return None
            # Path objects would take many times as long for thousands of names.
            names = os.listdir(self._folder)  # noqa: PTH208
        except FileNotFoundError:
            names, folder_ns = [], None
        settled = folder_ns is not None and time.time_ns() - folder_ns > _SETTLED_NS
        self._listed_ns = folder_ns if settled else None
        return self._measure(set(names))

    def _measure(self, listed: set[str]) -> set[str]:
        for gone in self._sizes.keys() - listed:
            del self._sizes[gone]
        for name in listed - self._sizes.keys():
            if FILE.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    # Path objects would take several times as long for 100,000 files at the start.
                    self._sizes[name] = os.stat(f"{self._folder}/{name}").st_size  # noqa: PTH116
        digests = {name[:64] for name in self._sizes if self._usable(name)}
        self.adapters, self.bytes = len(digests), sum(self._sizes.values())
        return digests
