"""The gateway's view of the catalog: a copy in memory, refreshed by rate-limited reads of the
store.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.state import CatalogState, PartitionsNotRead
from lorikeet.errors import (
    EndedKey,
    InvalidKey,
    StoreRefused,
    Unavailable,
    UnknownModel,
    UnknownTenant,
)
from lorikeet.retry_after import STORE_AWAY_S

log = logging.getLogger(__name__)

MIN_GAP_S = 0.1
"""Minimum seconds between two refreshes, however many unknown names clients ask for."""
LONGEST_WAIT_S = 2.0
"""Maximum seconds to wait for a store that does not answer. The wait delays only responses to
unknown names.
"""
MISSING_S = 1.0
"""Seconds for which a name that was not found is refused without another lookup."""
REMINDER_S = 10.0
"""Seconds between two logs of a failure while there is no view, and so nothing is served."""
_WAITS = (
    "this gateway answers 503 until the store does: no view of the catalog is kept on this machine"
)
_MOST_MISSING = 4096
_READERS = 8
_KEEPING_SHARE = 0.05
"""Maximum fraction of time spent on saving the view to a file. Saving 10,000 adapters takes
0.1 s.
"""

Name = tuple[str, str]
"""A tenant, and the `model` that a request of the tenant names."""
A = TypeVar("A")
T = TypeVar("T")


class GatewayCatalogView:
    """View of the catalog, refreshed in threads, one refresh at a time. For use in one event loop.

    The methods take questions: functions of a CatalogState (catalog/state.py), called with the
    view's last state. While the store fails, the last view stays in force; the beginning and the
    end of the failure are logged once, and without any view every REMINDER_S seconds.

    interval_s: seconds between refreshes.
    kept: file in which the last view is saved, to start from while the store is unreachable.
    """

    def __init__(
        self, catalog: CatalogReader, interval_s: float, kept: KeptView | None = None
    ) -> None:
        self._catalog, self._kept = catalog, kept
        self._interval_s = interval_s
        self._next: asyncio.Task[bool] | None = None
        self._refreshing = asyncio.Lock()
        self._begun_s = -MIN_GAP_S
        self._failure: Exception | None = None  # of the last refresh
        self._logged_s = 0.0  # last log of a failure
        self._answered_s = time.monotonic()
        self._partitions: dict[int, asyncio.Task[None]] = {}
        self._missing = _NegativeCache()
        # apart from refreshes' threads, which a hanging store must not occupy
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="catalog-partition")
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="catalog-question")

    @property
    def state(self) -> CatalogState:
        """Catalog state of the last view. Never blocks."""
        return self._catalog.state

    @property
    def age_s(self) -> float:
        """Seconds since the last successful refresh."""
        return time.monotonic() - self._answered_s

    async def ask(self, question: Callable[[CatalogState], T]) -> T:
        """Return question(state), with the last view's state.

        If the question needs partitions of the catalog that were not read yet, they are read first,
        in a thread.

        Raises Unavailable if the store does not answer.
        """
        while True:
            try:
                return question(self.state)
            except PartitionsNotRead as missing:
                await self._read_partitions(missing.numbers)

    async def find(self, question: Callable[[CatalogState], T], name: Name | None = None) -> T:
        """Return question(state); if the last view lacks the key, tenant or model, ask a refreshed
        view.

        name: tenant and model to remember as missing for MISSING_S seconds, if the refreshed view
            lacks the model as well; None if the question asks for no model.

        Raises InvalidKey, UnknownTenant and UnknownModel, and Unavailable if no refreshed view can
        be read.
        """
        try:
            return await self.ask(question)
        except (InvalidKey, UnknownTenant, UnknownModel) as error:
            if isinstance(error, EndedKey) or self._missing.holds(name):
                raise
        await self.refresh_or_raise()
        try:
            return await self.ask(question)
        except UnknownModel:
            if name is not None:
                self._missing.add(name)
            raise

    async def ask_in_thread(self, question: Callable[[CatalogState], T]) -> T:
        """Refresh the view, then return question(state), called in a thread.

        Raises StoreError if a partition of the catalog that the question needs cannot be read.
        """
        await self.refresh()
        return await self.in_thread(self._catalog.ask, question)

    async def in_thread(self, work: Callable[[A], T], argument: A) -> T:
        """Return work(argument), called in one of the threads that are reserved for long
        questions.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, argument)

    async def start(self) -> None:
        """Read the catalog. If the store is unreachable, start with the saved view or an empty one.

        Raises StoreRefused if there is no saved view and the store refuses access or holds no
        catalog.
        """
        if self.state.seq == 0 and self._kept is not None:
            kept = await asyncio.to_thread(self._kept.read)
            if kept is not None:
                self._catalog.begin_with(kept.state)
                self._answered_s = time.monotonic() - kept.age_s
        await self.refresh()
        if self.state.seq == 0 and isinstance(self._failure, StoreRefused):
            raise self._failure

    async def keep(self) -> None:
        """Save the view to its file repeatedly, as long as refreshes succeed, until cancelled."""
        if self._kept is None:
            return
        held: CatalogState | None = None
        pause_s, failing = self._interval_s, False
        while True:
            await asyncio.sleep(pause_s)
            state, began_s = self.state, time.monotonic()
            if state.seq == 0 or self.age_s > self._interval_s + LONGEST_WAIT_S:
                continue
            try:
                confirmed = state is held and await asyncio.to_thread(self._kept.confirm, state.seq)
                if not confirmed:
                    await asyncio.to_thread(self._kept.write, state)
                held, failing = state, False
            except OSError as error:
                if not failing:
                    log.warning("view_not_kept", extra={"error": repr(error)})
                held, failing = None, True
            took_s = time.monotonic() - began_s
            pause_s = max(self._interval_s, took_s / _KEEPING_SHARE)

    async def follow(self) -> None:
        """Refresh the view every interval_s seconds, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def refresh(self) -> CatalogState:
        """Return the catalog's state, as read after this call began.

        If the store does not answer, the last known state is returned.
        """
        await self._read()
        return self.state

    async def refresh_or_raise(self) -> CatalogState:
        """Return the catalog's state, as read after this call began.

        Raises Unavailable if the store does not answer.
        """
        if not await self._read():
            raise Unavailable(
                "what this request names is not known here, and the catalog cannot be read now: "
                "send it again later",
                retry_after_s=STORE_AWAY_S,
            )
        return self.state

    async def _read_partitions(self, numbers: Collection[int]) -> None:
        """Read partitions of the catalog by number. Tasks that wait for the same partition share
        one read.

        Raises Unavailable if the store does not answer.
        """
        wanted = [number for number in numbers if number not in self._partitions]
        if wanted:
            reading = asyncio.create_task(self._read_together(wanted))
            self._partitions.update(dict.fromkeys(wanted, reading))
        tasks = {self._partitions[number] for number in numbers}
        done, waiting = await asyncio.wait(tasks, timeout=LONGEST_WAIT_S)
        failures = [error for task in done if (error := task.exception())]
        if waiting or failures:
            raise Unavailable(
                "what this request names is not read yet, and the catalog cannot be read now: "
                "send it again later",
                retry_after_s=STORE_AWAY_S,
            ) from next(iter(failures), None)

    async def _read_together(self, numbers: list[int]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._readers, self._catalog.read, numbers)
        finally:
            for number in numbers:
                del self._partitions[number]

    async def _read(self) -> bool:
        """Wait for a refresh that begins after this call; return whether it succeeds within
        LONGEST_WAIT_S seconds.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._refresh())
        done, _ = await asyncio.wait([self._next], timeout=LONGEST_WAIT_S)
        return any(task.result() for task in done)

    async def _refresh(self) -> bool:
        async with self._refreshing:
            await asyncio.sleep(self._begun_s + MIN_GAP_S - time.monotonic())
            self._begun_s = time.monotonic()
            self._next = None  # callers from here on want a later read
            try:
                await asyncio.to_thread(self._catalog.refresh)
            except Exception as error:  # on any error the last view stays in force
                self._log_failure(error)
                self._failure = error
                return False
            if self._failure is not None:
                log.info("catalog_reachable", extra={"seq": self.state.seq})
            self._failure = None
            self._answered_s = time.monotonic()
            return True

    def _log_failure(self, error: Exception) -> None:
        """Log a refresh's error if the previous refresh succeeded. While there is no view, log an
        error every REMINDER_S seconds as well.
        """
        now_s, has_view = time.monotonic(), self.state.seq > 0
        if self._failure is None or (not has_view and now_s - self._logged_s >= REMINDER_S):
            waits = {} if has_view else {"waits": _WAITS}
            log.warning("catalog_unreachable", extra={"error": repr(error), **waits})
            self._logged_s = now_s


class _NegativeCache:
    """Cache of names that were not found, each for MISSING_S seconds. Its size is bounded."""

    def __init__(self) -> None:
        self._until: dict[Name, float] = {}

    def add(self, name: Name) -> None:
        if len(self._until) >= _MOST_MISSING:
            self._until.clear()
        self._until[name] = time.monotonic() + MISSING_S

    def holds(self, name: Name | None) -> bool:
        return name is not None and self._until.get(name, 0.0) > time.monotonic()
