"""A ring of records in memory that processes share: one writes, all others read all of it in order.

    memory   | read positions, one a reader | record 7 │ record 8 │ hole │ record 5 │ record 6 |
                                            └ capacity bytes, used round and round

A record is its length and its bytes. The memory has no name: whoever inherits its descriptor maps
it. For each record a byte goes to each reader through a pipe, which wakes it, and orders the two
processes' reads and writes of the memory. The pipe's end is the ring's.
"""

import mmap
import os
import struct
import time

import numpy as np

_LENGTH = struct.Struct("<q")
_POSITION_BYTES = 8
_WAKES = 1 << 12  # bytes of the pipe to read at once
_FULL_S = 50e-6  # how long to wait for the slowest reader before looking again


class SharedMemory:
    """Memory of at least this many bytes that a child process maps by a descriptor it inherits."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        """Map the memory behind a descriptor, which is closed by `close`, or new memory."""
        self.size = max(1, size)
        self.fd = os.memfd_create("lorikeet") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, self.size)
        self.bytes = mmap.mmap(self.fd, self.size)

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as anything here refers to it."""
        os.close(self.fd)


class _Ring:
    """Both ends' view of the memory: read positions, then the records."""

    def __init__(self, memory: SharedMemory, readers: int) -> None:
        self._positions = np.frombuffer(memory.bytes, np.int64, readers)
        self._records = memoryview(memory.bytes)[readers * _POSITION_BYTES : memory.size]
        self.capacity = len(self._records)

    def _put(self, position: int, data: bytes) -> None:
        at = position % self.capacity
        front = data[: self.capacity - at]
        self._records[at : at + len(front)] = front
        self._records[: len(data) - len(front)] = data[len(front) :]

    def _get(self, position: int, length: int) -> bytes:
        at = position % self.capacity
        front = self._records[at : at + length]
        return b"".join((front, self._records[: length - len(front)]))


class RingWriter(_Ring):
    """The writing end. Belongs to one thread at a time.

    capacity: the most bytes of records that are not read yet, 8 for each record included.
    """

    def __init__(self, memory: SharedMemory, wake_fds: list[int]) -> None:
        """wake_fds: the writing ends of the readers' pipes, which the ring closes."""
        super().__init__(memory, len(wake_fds))
        self._wake_fds = wake_fds
        self._written = 0

    def write(self, record: bytes) -> None:
        """Write a record; waits while readers have not read what is where it goes.

        Raises ValueError for one that never fits, BrokenPipeError when a reader is gone.
        """
        size = _LENGTH.size + len(record)
        if size > self.capacity:
            raise ValueError(f"a record of {size} bytes in a ring of {self.capacity}")
        while self._written + size - int(self._positions.min()) > self.capacity:
            time.sleep(_FULL_S)
        self._put(self._written, _LENGTH.pack(len(record)))
        self._put(self._written + _LENGTH.size, record)
        self._written += size
        for fd in self._wake_fds:
            os.write(fd, b"\0")

    def close(self) -> None:
        """Let the readers see the end once they have read all."""
        for fd in self._wake_fds:
            os.close(fd)
        self._wake_fds = []


class RingReader(_Ring):
    """A reading end. Belongs to one thread."""

    def __init__(self, memory: SharedMemory, readers: int, index: int, wake_fd: int) -> None:
        """index: which of the readers this is. wake_fd: the reading end of its pipe."""
        super().__init__(memory, readers)
        self._index, self._wake_fd = index, wake_fd
        self._ready = 0

    def read(self) -> bytes:
        """The next record, once there is one. Raises EOFError when none is to come."""
        if not self._ready:
            self._ready = len(os.read(self._wake_fd, _WAKES))
            if not self._ready:
                raise EOFError
        self._ready -= 1
        position = int(self._positions[self._index])
        (length,) = _LENGTH.unpack(self._get(position, _LENGTH.size))
        record = self._get(position + _LENGTH.size, length)
        self._positions[self._index] = position + _LENGTH.size + length
        return record
