"""A large body as a file, and its digest, in the memory of some megabytes."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from pathlib import Path

from lorikeet.errors import StoreError

_WRITE_BYTES = 4 * 2**20


async def receive_file(parts: AsyncIterator[bytes], path: Path, workers: Executor) -> str:
    """Write a body to `path` as it comes; return its SHA-256, 64 hex digits.

    Raises what `parts` raises, and StoreError when the disk is full.
    """
    loop, sha256 = asyncio.get_running_loop(), hashlib.sha256()
    try:
        with path.open("wb") as file:

            def write(held: list[bytes]) -> None:
                joined = b"".join(held)
                sha256.update(joined)
                file.write(joined)

            writing = loop.run_in_executor(workers, write, [])
            try:
                held: list[bytes] = []
                held_bytes = 0
                async for part in parts:
                    held.append(part)
                    held_bytes += len(part)
                    if held_bytes >= _WRITE_BYTES:  # hashed and written while more comes
                        await writing
                        writing = loop.run_in_executor(workers, write, held)
                        held, held_bytes = [], 0
            finally:
                await writing
            await loop.run_in_executor(workers, write, held)
    except OSError as error:
        raise StoreError(
            f"the gateway could not keep the upload ({error.strerror}): free space in "
            f"{path.parent.parent}, then send it again"
        ) from error
    return sha256.hexdigest()
