"""Ring buffer of records in shared memory: one process writes, all others read every record.

    memory   | read positions, one a reader | record 7 │ record 8 │ hole │ record 5 │ record 6 |
                                            └ capacity bytes, used round and round

A record is its length and its bytes. The memory has no name: child processes inherit its descriptor
and map it. For each record the writer sends one byte to each reader through a pipe, which wakes the
reader and orders the two processes' accesses to the memory. Closing the pipes closes the ring.
"""

import mmap
import os
import struct
import time

import numpy as np

_LENGTH = struct.Struct("<q")
_POSITION_BYTES = 8
_WAKES = 1 << 12  # bytes of the pipe to read at once
_FULL_S = 50e-6  # between checks for the slowest reader while the ring is full


class SharedMemory:
    """Anonymous shared memory, which child processes map through an inherited descriptor."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        """Create and map new memory, or map the memory of an existing descriptor.

        size: bytes of the memory; 0 becomes 1.
        fd: descriptor of existing memory, which `close` will close; None: create new memory.
        """
        self.size = max(1, size)
        self.fd = os.memfd_create("lorikeet") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, self.size)
        self.bytes = mmap.mmap(self.fd, self.size)

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped as long as this process refers to it."""
        os.close(self.fd)


class _Ring:
    """Memory layout that a ring buffer's writer and readers share: for each reader, the number of
    bytes that it has read, then the records.
    """

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
    """Writing end of a ring buffer. Used by one thread at a time.

    capacity: maximum number of bytes of all records that some reader has not read yet. Each record
        counts 8 bytes more, for its length.
    """

    def __init__(self, memory: SharedMemory, wake_fds: list[int]) -> None:
        """Open the ring for writing.

        wake_fds: writing end of each reader's pipe; `close` closes them.
        """
        super().__init__(memory, len(wake_fds))
        self._wake_fds = wake_fds
        self._written = 0

    def write(self, record: bytes) -> None:
        """Write a record. Waits while records that some reader has not read take the space.

        Raises ValueError for a record larger than the ring, BrokenPipeError when a reader is gone.
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
        """Close the readers' pipes: readers get EOFError once they have read all records."""
        for fd in self._wake_fds:
            os.close(fd)
        self._wake_fds = []


class RingReader(_Ring):
    """Reading end of a ring buffer. Used by one thread."""

    def __init__(self, memory: SharedMemory, readers: int, index: int, wake_fd: int) -> None:
        """Open the ring for one of its readers.

        memory: the ring's memory, which the writer and all readers map.
        readers: number of readers.
        index: index of this reader.
        wake_fd: reading end of this reader's pipe, which the writer writes to for each record.
        """
        super().__init__(memory, readers)
        self._index, self._wake_fd = index, wake_fd
        self._ready = 0

    def read(self) -> bytes:
        """Wait for the next record and return it.

        Raises EOFError if the writer has closed the ring and no record is left.
        """
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
