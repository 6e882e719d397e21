"""Keeps the gateway's view of the catalog fresh without asking the store too often."""

import asyncio
import logging
import time

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import Unavailable

log = logging.getLogger(__name__)

MIN_GAP_S = 0.1
"""Refreshes begin at most this often, however many unknown names clients ask for."""
LONGEST_WAIT_S = 2.0
"""A store that hangs delays the answer to an unknown name by this much and nothing else."""


class CatalogFollower:
    """Refreshes the catalog off the event loop, one refresh at a time. For one event loop.

    A store that fails leaves the last view in force; that is logged once, and so is its end.
    """

    def __init__(self, catalog: AdapterCatalog, interval_s: float) -> None:
        self._catalog = catalog
        self._interval_s = interval_s
        self._next: asyncio.Task[bool] | None = None
        self._refreshing = asyncio.Lock()
        self._begun_s = -MIN_GAP_S
        self._failing = False

    @property
    def state(self) -> CatalogState:
        """The last view; never blocks."""
        return self._catalog.state

    async def follow(self) -> None:
        """Refresh every interval, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.refreshed()

    async def refreshed(self) -> CatalogState:
        """A view that was read after this call, or the last one if the store does not answer."""
        await self._read()
        return self.state

    async def looked_again(self) -> CatalogState:
        """A view that was read after this call. Raises Unavailable if the store does not answer."""
        if not await self._read():
            raise Unavailable(
                "what this request names is not known here, and the catalog cannot be read now: "
                "send it again later"
            )
        return self.state

    async def _read(self) -> bool:
        """Whether it worked in time. All who call before the read begins share it."""
        if self._next is None:
            self._next = asyncio.create_task(self._refresh())
        done, _ = await asyncio.wait([self._next], timeout=LONGEST_WAIT_S)
        return any(task.result() for task in done)

    async def _refresh(self) -> bool:
        async with self._refreshing:
            await asyncio.sleep(self._begun_s + MIN_GAP_S - time.monotonic())
            self._begun_s = time.monotonic()
            self._next = None  # who asks from here on wants a later read
            try:
                await asyncio.to_thread(self._catalog.refresh)
            except Exception as error:  # whatever it is, the last view serves on
                if not self._failing:
                    log.warning("catalog_unreachable", extra={"error": repr(error)})
                self._failing = True
                return False
            if self._failing:
                log.info("catalog_reachable", extra={"seq": self.state.seq})
            self._failing = False
            return True
