"""Download in parallel ranges with a SHA-256 that is computed in order during the download.

One thread per connection writes its range into the file. The caller's thread reads back the bytes
that have arrived without a gap, from the page cache, and hashes them. The digest is therefore known
a few milliseconds after the last byte.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MIB = 2**20
RANGE_BYTES = 8 * _MIB
"""Bytes per request. With shorter requests latency dominates; with longer ones hashing falls behind
the download.
"""

CONNECTIONS = 15
"""Parallel connections: one reaches 85-90 MB/s on S3, and 15 fill 10 Gb/s."""

ReadRange = Callable[[int, int], Iterator[bytes]]
"""Reader of the bytes [start, end), in pieces as they arrive. Called on many threads."""


def download(size_bytes: int, path: Path, read: ReadRange) -> str:
    """Write an object of `size_bytes` to a file and return its SHA-256, 64 hex digits.

    read: yields the object's bytes from a start to an end position; called on many threads.

    Raises the error that `read` raised, after all threads have stopped writing; the file is then
    incomplete.
    """
    starts = range(0, size_bytes, RANGE_BYTES)
    with path.open("w+b") as file, ThreadPoolExecutor(CONNECTIONS) as connections:
        progress = _Progress(starts)

        def fetch(number: int) -> None:
            try:
                at = starts[number]
                for piece in read(at, min(at + RANGE_BYTES, size_bytes)):
                    _write(file.fileno(), piece, at)
                    at += len(piece)
                    if not progress.advance(number, at):
                        return
            except BaseException as error:
                progress.fail(error)

        for number in range(len(starts)):
            connections.submit(fetch, number)
        try:
            return _hash(file.fileno(), progress, size_bytes)
        finally:
            connections.shutdown(cancel_futures=True)


class _Progress:
    """Bytes of a downloaded file written so far, in each range. Thread-safe.

    starts: first byte of each range.
    """

    def __init__(self, starts: range) -> None:
        self._ends = list(starts)  # end of the bytes written, in each range
        self._awaited = 0  # the range being hashed; progress in other ranges notifies nobody
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def advance(self, number: int, end: int) -> bool:
        """Record that range `number` is written up to byte `end` of the file.

        Returns False if another range has failed, so that this one should stop.
        """
        with self._changed:
            self._ends[number] = end
            if number == self._awaited:
                self._changed.notify()
            return self._failure is None

    def fail(self, error: BaseException) -> None:
        """Record that a range cannot be read, which stops the other ranges."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify()

    def wait_beyond(self, at: int) -> int:
        """Wait until byte `at` of the file is written; return the end of the bytes written in the
        range of that byte.

        Raises the error of a range that failed.
        """
        number = at // RANGE_BYTES
        with self._changed:
            self._awaited = number
            self._changed.wait_for(lambda: self._failure or self._ends[number] > at)
            if self._failure is not None:
                raise self._failure
            return self._ends[number]


def _hash(descriptor: int, progress: _Progress, size_bytes: int) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_MIB))
    at = 0
    while at < size_bytes:
        end = progress.wait_beyond(at)
        while at < end:
            count = os.preadv(descriptor, [buffer[: end - at]], at)
            digest.update(buffer[:count])
            at += count
    return digest.hexdigest()


def _write(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count
