"""Gives memory that this process has freed back to the system, through glibc's malloc_trim."""

import asyncio

from lorikeet_engine.malloc_trim import glibc, trim_malloc

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_FIRST_BYTES = 128 * 2**10
"""glibc's initial value of both thresholds."""

TRIM_S = 2.0


async def trim_freed_memory(trim_s: float = TRIM_S) -> None:
    """Give back to the system what is free, until cancelled; elsewhere than on glibc, nothing.

    Ray runs each call of an asynchronous actor, and so each open request of a gateway, on a stack
    of 256 KiB. glibc maps such a block by itself, until the largest block that was ever mapped and
    freed raises its thresholds. From then on stacks come from the heap, and take all of their
    pages, for what was there before has touched them; mapped, they take those that they touch.

    Ray's exporter takes some 4 KB for each series every ten seconds, and each time in another of
    glibc's arenas, which all keep it. malloc_trim gives back every page that is free.
    """
    library = glibc()
    if library is None:
        return
    library.mallopt(_TRIM_THRESHOLD, _FIRST_BYTES)
    library.mallopt(_MMAP_THRESHOLD, _FIRST_BYTES)
    while True:
        await asyncio.sleep(trim_s)
        await asyncio.to_thread(trim_malloc)
