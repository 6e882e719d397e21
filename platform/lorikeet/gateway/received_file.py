"""A large body as a file, and its digest, in the memory of some megabytes."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from pathlib import Path
from typing import BinaryIO

from lorikeet.errors import StoreError
from lorikeet_engine.adapter_format import ValueScan

# Beside a busy event loop a thread mostly waits for the interpreter, some five times for each piece
# however large; 4 ms are left to do when the last has come. A blob's header is in the first. A
# multiple of SCAN_ALIGNMENT.
_PIECE_BYTES = 2**22


async def receive_file(
    parts: AsyncIterator[bytes], path: Path, workers: Executor, scan: ValueScan | None = None
) -> str:
    """Write a body to `path` as it comes; return its SHA-256, 64 hex digits.

    scan: sees its bytes, too. Raises what `parts` raises, and StoreError when the disk is full.
    """
    loop = asyncio.get_running_loop()
    try:
        with path.open("wb") as file:
            body = _Body(file, scan)
            writing = loop.create_future()
            writing.set_result(None)
            # One piece is looked at and written while the other is filled. New memory for each part
            # would cost as much as copying.
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
    """What is done with a body's bytes, in a thread."""

    def __init__(self, file: BinaryIO, scan: ValueScan | None) -> None:
        self._file, self._scan, self._sha256 = file, scan, hashlib.sha256()

    def take(self, piece: memoryview) -> None:
        """Take in what has come since the last call."""
        self._sha256.update(piece)
        self._file.write(piece)
        if self._scan is not None and piece:
            self._scan.take(piece)

    def end(self, piece: memoryview) -> str:
        """Take in the last of it; return the digest."""
        self.take(piece)
        self._file.flush()
        return self._sha256.hexdigest()
