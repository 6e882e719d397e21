"""File of KV pages that leave host memory.

The file has no name, so it ends with its process, even a killed one, and no other process reads it.
"""

import ctypes
import os
import tempfile
import time
from pathlib import Path

import torch

from lorikeet_engine.costs import LoadCosts

_KEY_BYTES = 32
_BLOCK = 4096
_WEIGHT = 0.1  # of the latest read in the measured time of a byte


class PageFile:
    """Rows of host memory in a file, each behind the key of its page.

    A row ends with a checksum of its own (page_copies.py); the key reveals a row that was not
    written, or written for another page.

    places: number of rows for which the file has room.
    """

    def __init__(self, folder: Path, size: int, row_bytes: int) -> None:
        """Create the file and allocate its blocks. Raises OSError if the disk has too few, or if
        its file system cannot allocate blocks without writing them.

        size: size of the file in bytes.
        row_bytes: bytes of a row.
        """
        self._row_bytes = row_bytes
        self._stride = -(-(row_bytes + _KEY_BYTES) // _BLOCK) * _BLOCK
        self.places = size // self._stride
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        if self.places:
            _allocate(self._file.fileno(), self.places * self._stride)
        costs = LoadCosts()  # until reads are measured
        self._latency_s, self._byte_s = costs.disk_latency_s, 1 / costs.disk_bytes_per_s

    def read_s(self, size: int) -> float:
        """Return the expected seconds of reading so many bytes; 0 for none."""
        return self._latency_s + size * self._byte_s if size else 0.0

    def write(self, place: int, key: bytes, row: torch.Tensor) -> None:
        """Write a row to a place of the file. Raises OSError."""
        done = os.pwritev(self._file.fileno(), [key, _bytes_of(row)], place * self._stride)
        if done != _KEY_BYTES + self._row_bytes:
            raise OSError(f"{done} bytes of a KV page were written")

    def read(self, place: int, key: bytes, row: torch.Tensor) -> bool:
        """Read a row from a place of the file; return whether it was written with this key.

        Raises OSError.
        """
        found, began_s = bytearray(_KEY_BYTES), time.monotonic()
        done = os.preadv(self._file.fileno(), [found, _bytes_of(row)], place * self._stride)
        byte_s = (time.monotonic() - began_s) / (_KEY_BYTES + self._row_bytes)
        self._byte_s += _WEIGHT * (byte_s - self._byte_s)
        return done == _KEY_BYTES + self._row_bytes and found == key


def _allocate(fd: int, size: int) -> None:
    # os.posix_fallocate would write all blocks on file systems that cannot allocate them.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _bytes_of(row: torch.Tensor) -> memoryview:
    return row.numpy().data.cast("B")
