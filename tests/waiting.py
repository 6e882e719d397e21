"""Waits for what other threads, processes and tasks do."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


def eventually(holds: Callable[[], Any], within_s: float = 5.0) -> bool:
    """Whether `holds` becomes true in time; polls more and more slowly."""
    deadline, pause_s = time.monotonic() + within_s, _FIRST_PAUSE_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
    return True


async def until(holds: Callable[[], Any], within_s: float = 5.0) -> None:
    """Let other tasks run until `holds` is true. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.005)
