"""Writes a request's body to a file, off the event loop."""

import asyncio
from concurrent.futures import Executor
from pathlib import Path

from starlette.requests import Request

from lorikeet.api.body import limited
from lorikeet.errors import StoreError

_WRITE_BYTES = 4 * 2**20


async def receive(request: Request, path: Path, max_bytes: int, workers: Executor) -> None:
    """Write the body to `path`. Raises RequestTooLarge, and StoreError when the disk is full."""
    loop = asyncio.get_running_loop()
    try:
        with path.open("wb") as file:
            held: list[bytes] = []
            held_bytes = 0
            async for part in limited(request, max_bytes):
                held.append(part)
                held_bytes += len(part)
                if held_bytes >= _WRITE_BYTES:
                    await loop.run_in_executor(workers, file.write, b"".join(held))
                    held, held_bytes = [], 0
            await loop.run_in_executor(workers, file.write, b"".join(held))
    except OSError as error:
        raise StoreError(
            f"the gateway could not keep the upload ({error.strerror}): free space in "
            f"{path.parent.parent}, then send it again"
        ) from error
