"""How much a disk cache's folder holds, kept up to date without asking for every file again."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

FILE = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{16})?")
"""A blob's name, or an image's: its digest and a fingerprint."""


class DiskStock:
    """The files of the last listing, each measured once: nobody writes to one that has its name.

    For one thread; adapters, which have a usable file, and bytes, of all files, are for any.
    """

    def __init__(self, folder: Path, usable: Callable[[str], bool]) -> None:
        """usable: whether this process can use a file of that name."""
        self._folder, self._usable = folder, usable
        self._sizes: dict[str, int] = {}
        self.adapters = self.bytes = 0

    def take(self, names: Iterable[str]) -> set[str]:
        """These are the folder's names now. Returns the digests of the adapters."""
        listed = set(names)
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
