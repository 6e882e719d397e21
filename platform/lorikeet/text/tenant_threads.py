"""Threads for work on texts, of which one tenant takes only some."""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

_THREADS, _THREADS_PER_TENANT = 3, 2
"""Maximum numbers of threads: for all tenants together, and for one tenant.

The limit for one tenant keeps its long texts from delaying other tenants.
"""


class TenantThreads:
    """Threads that run functions for tenants. For use in one event loop.

    Further functions wait until a thread is free, and those of one tenant until fewer than
    `per_tenant` of its functions run.
    """

    def __init__(self, threads: int = _THREADS, per_tenant: int = _THREADS_PER_TENANT) -> None:
        """Make no threads yet.

        threads, per_tenant: maximum numbers of threads, for all tenants together and for one.
        """
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._per_tenant = per_tenant
        self._tenant_slots = WeakValueDictionary[str, asyncio.Semaphore]()  # by tenant

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Return the result of `work`, which a thread computes. Raises the exception of `work`.

        A function that has begun runs to its end, even if the caller is cancelled.
        """
        slot = self._tenant_slots.setdefault(tenant, asyncio.Semaphore(self._per_tenant))
        await slot.acquire()
        loop, working = asyncio.get_running_loop(), self._threads.submit(work)

        def done(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(slot.release)

        working.add_done_callback(done)
        return await asyncio.wrap_future(working)


class ThreadCache(Generic[T]):
    """The last used results of a slow function, which threads compute. For one event loop."""

    def __init__(self, compute: Callable[..., T], size: int, threads: TenantThreads) -> None:
        """Compute nothing yet.

        size: number of results that are kept.
        """
        self._compute, self._size, self._threads = compute, size, threads
        self._kept: dict[tuple[Hashable, ...], T] = {}  # the last used one is last

    async def get(self, tenant: str, *arguments: Hashable) -> T:
        """Return the function's result; at once if it is kept. Raises the function's exceptions.

        tenant: tenant that occupies the thread.
        """
        if arguments in self._kept:
            result = self._kept.pop(arguments)
        else:
            result = await self._threads.run(tenant, partial(self._compute, *arguments))
        self._kept[arguments] = result
        if len(self._kept) > self._size:
            del self._kept[next(iter(self._kept))]
        return result
