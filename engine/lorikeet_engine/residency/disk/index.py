"""What a disk cache's folder holds, kept up to date without a stat of every file again."""

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
"""A blob's name, or an image's: its digest and a fingerprint."""

# What happens in a folder so soon after can leave its time as it was.
_SETTLED_NS = 100_000_000


class DiskIndex:
    """The files of the last listing, and what this process has done since.

    Each is measured once: nobody writes to one that has its name. `changed` is for one thread;
    the rest is for any, and `holds` waits for nobody. adapters, which have a usable file, and
    bytes, of all files, are those of the last listing.
    """

    def __init__(self, folder: Path, usable: Callable[[str], bool]) -> None:
        """usable: whether this process can use a file of that name."""
        self._folder, self._usable = folder, usable
        self._lock = threading.Lock()  # guards the sizes against two changes at once
        self._sizes: dict[str, int] = {}
        self._listed_ns: int | None = None  # the folder's time, unless it must be listed again
        self.adapters = self.bytes = 0
        self.changed()
        self._listed_ns = None  # the first reader has been told nothing yet

    def holds(self, name: str) -> bool:
        """Whether the folder has a file of that name, as far as this process knows."""
        return name in self._sizes

    def use(self, name: str) -> Path:
        """The file, which counts as used now. Raises FileNotFoundError."""
        path = self._folder / name
        try:
            os.utime(path)
        except FileNotFoundError:  # another process may have removed it
            self.remove(name)
            raise
        except OSError as error:  # a disk that takes no more can be read
            log.warning("disk_use_not_noted", extra={"file": name, "error": str(error)})
        self.add(path)  # or have added it
        return path

    def add(self, path: Path) -> None:
        """Take in that this process has put a file there, or found it."""
        if path.name not in self._sizes:
            with contextlib.suppress(FileNotFoundError):
                size = path.stat().st_size
                with self._lock:
                    self._sizes[path.name] = size

    def remove(self, name: str) -> None:
        """Take in that this process has removed a file, or found that it is gone."""
        with self._lock:
            self._sizes.pop(name, None)

    def changed(self) -> set[str] | None:
        """The digests of the adapters; None if the folder is as at the last call."""
        with self._lock:  # or what is added after the listing would be taken for removed
            return self._list()

    def _list(self) -> set[str] | None:
        try:
            folder_ns = self._folder.stat().st_mtime_ns
            if folder_ns == self._listed_ns:
                return None
            # Thousands of names: paths would take many times as long.
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
                    # A hundred thousand at the start: paths would take several times as long.
                    self._sizes[name] = os.stat(f"{self._folder}/{name}").st_size  # noqa: PTH116
        digests = {name[:64] for name in self._sizes if self._usable(name)}
        self.adapters, self.bytes = len(digests), sum(self._sizes.values())
        return digests
