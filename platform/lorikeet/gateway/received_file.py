"""A large body as a file, and its digest, in the memory of some megabytes."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from pathlib import Path
from typing import BinaryIO

from lorikeet.errors import StoreError
from lorikeet_engine.adapter_format import SCAN_ALIGNMENT, ValueScan

# Beside a busy event loop a thread mostly waits for the interpreter, some five times for each piece
# however large; 4 ms are left to do when the last has come. A blob's header is in the first.
_WRITE_BYTES = 2**22


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
            try:
                held: list[bytes] = []
                held_bytes = 0
                async for part in parts:
                    held.append(part)
                    held_bytes += len(part)
                    if held_bytes >= _WRITE_BYTES:  # looked at and written while more comes
                        await writing
                        writing = loop.run_in_executor(workers, body.take, held)
                        held, held_bytes = [], 0
            finally:
                await writing
            return await loop.run_in_executor(workers, body.end, held)
    except OSError as error:
        raise StoreError(
            f"the gateway could not keep the upload ({error.strerror}): free space in "
            f"{path.parent.parent}, then send it again"
        ) from error


class _Body:
    """What is done with a body's bytes, in a thread."""

    def __init__(self, file: BinaryIO, scan: ValueScan | None) -> None:
        self._file, self._scan, self._sha256 = file, scan, hashlib.sha256()
        self._rest = b""  # less than SCAN_ALIGNMENT bytes

    def take(self, parts: list[bytes]) -> None:
        """Take in what has come since the last call."""
        data = b"".join((self._rest, *parts))
        whole = len(data) - len(data) % SCAN_ALIGNMENT
        self._rest = data[whole:]
        self._take(memoryview(data)[:whole])

    def end(self, parts: list[bytes]) -> str:
        """Take in the last of it; return the digest."""
        self.take(parts)
        self._take(memoryview(self._rest))
        self._file.flush()
        return self._sha256.hexdigest()

    def _take(self, data: memoryview) -> None:
        if not data:
            return
        self._sha256.update(data)
        self._file.write(data)
        if self._scan is not None:
            self._scan.take(data)
