"""Background task of a gateway that returns freed memory to the system."""

import asyncio

from lorikeet_engine.malloc_trim import glibc, trim_malloc

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of mallopt(3)
_FIRST_BYTES = 128 * 2**10
"""Initial value of glibc's thresholds for mapping a block and for trimming the heap."""

TRIM_S = 2.0
"""Seconds between two calls of malloc_trim."""


async def trim_freed_memory(trim_s: float = TRIM_S) -> None:
    """Return free memory to the system every `trim_s` seconds, until cancelled.

    Does nothing without glibc. Fixes two causes of memory that stays with the process:

    - Stacks. Ray runs each call of an asynchronous actor, so each open request of a gateway, on a
      stack of 256 KiB. glibc maps such a block on its own, and only the pages that are touched take
      memory. But when a larger mapped block is freed, glibc raises its thresholds and takes later
      stacks from the heap, where earlier data has touched all of their pages. Setting the
      thresholds by mallopt keeps glibc from raising them.
    - Arenas. Ray's metrics exporter allocates about 4 KB per series every ten seconds, each time in
      another of glibc's arenas, and every arena keeps its free memory. malloc_trim returns the free
      pages of all arenas.
    """
    library = glibc()
    if library is None:
        return
    library.mallopt(_TRIM_THRESHOLD, _FIRST_BYTES)
    library.mallopt(_MMAP_THRESHOLD, _FIRST_BYTES)
    while True:
        await asyncio.sleep(trim_s)
        await asyncio.to_thread(trim_malloc)
