"""Reception of a large body into a file, and its SHA-256, in a few megabytes of memory."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from pathlib import Path
from typing import BinaryIO

from lorikeet.errors import StoreError
from lorikeet_engine.adapter_format import ValueScan

# Beside a busy event loop a thread mostly waits for the interpreter's lock, some five times per
# piece of any size, so pieces are large. At this size, work on the last piece takes 4 ms, and the
# first piece holds a blob's whole header. A multiple of SCAN_ALIGNMENT.
_PIECE_BYTES = 2**22


async def receive_file(
    parts: AsyncIterator[bytes], path: Path, workers: Executor, scan: ValueScan | None = None
) -> str:
    """Write a request's body to `path` as it arrives; return its SHA-256, 64 hex digits.

    parts: the body's bytes.
    workers: threads that hash and write.
    scan: scan of the values of the blob's tensors, to which the body is passed on; None: no scan.

    Raises the errors that `parts` raises, and StoreError if the file cannot be written.
    """
    loop = asyncio.get_running_loop()
    try:
        with path.open("wb") as file:
            body = _Body(file, scan)
            writing = loop.create_future()
            writing.set_result(None)
            # One piece is scanned and written while the other is filled. Allocating memory for each
            # part would cost as much as copying.
            filling, other = (memoryview(bytearray(_PIECE_BYTES)) for _ in range(2))
            filled = 0
            try:
                async for part in parts:
                    rest = memoryview(part)
                    while rest:
                        taken = rest[: _PIECE_BYTES - filled]
                        filling[filled : filled + len(taken)] = taken
                        filled, rest = filled + len(taken), rest[len(taken) :]
                        if filled == _PIECE_BYTES:
                            await writing
                            writing = loop.run_in_executor(workers, body.take, filling)
                            filling, other, filled = other, filling, 0
            finally:
                await writing
            return await loop.run_in_executor(workers, body.end, filling[:filled])
    except OSError as error:
        raise StoreError(
            f"the gateway could not keep the upload ({error.strerror}): free space in "
            f"{path.parent.parent}, then send it again"
        ) from error


class _Body:
    """Consumer of a body's bytes in worker threads: updates the SHA-256, writes the file and, with
    a ValueScan, scans the values of the blob's tensors.
    """

    def __init__(self, file: BinaryIO, scan: ValueScan | None) -> None:
        self._file, self._scan, self._sha256 = file, scan, hashlib.sha256()

    def take(self, piece: memoryview) -> None:
        """Hash and write the body's next bytes, and scan the tensors' values in them."""
        self._sha256.update(piece)
        self._file.write(piece)
        if self._scan is not None and piece:
            self._scan.take(piece)

    def end(self, piece: memoryview) -> str:
        """Hash and write the body's last bytes, and scan the tensors' values in them; return the
        whole body's SHA-256 in hex.
        """
        self.take(piece)
        self._file.flush()
        return self._sha256.hexdigest()
