"""The gateway's view of the catalog, kept fresh without asking the store too often."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.state import CatalogState, PartitionsNotRead
from lorikeet.errors import EndedKey, InvalidKey, StoreRefused, Unavailable, UnknownModel
from lorikeet.retry_after import STORE_AWAY_S

log = logging.getLogger(__name__)

MIN_GAP_S = 0.1
"""Refreshes begin at most this often, however many unknown names clients ask for."""
LONGEST_WAIT_S = 2.0
"""A store that hangs delays the response to an unknown name by this much, and nothing else."""
MISSING_S = 1.0
"""How long a missing name is refused without looking it up again."""
_MOST_MISSING = 4096
_READERS = 8
_KEEPING_SHARE = 0.05
"""The most of its time that a gateway spends on keeping its view: 10,000 adapters take 0.1 s."""

Name = tuple[str, str]
"""A tenant and the model that it asks for."""
A = TypeVar("A")
T = TypeVar("T")


class GatewayCatalogView:
    """Refreshes the catalog off the event loop, one refresh at a time. For one event loop.

    A question is a function of a CatalogState (catalog/state.py), called with the last one: where
    that knows the answer, which is nearly always, nothing is awaited and nothing else runs.
    A store that fails leaves the last view in force; that is logged once, and so is its end.
    kept: the file of the last view, to begin with while the store is away.
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
        self._answered_s = time.monotonic()
        self._partitions: dict[int, asyncio.Task[None]] = {}
        self._missing = _NegativeCache()
        # threads of their own: a store that hangs must not keep refreshes from theirs
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="catalog-partition")
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="catalog-question")

    @property
    def state(self) -> CatalogState:
        """The last view; never blocks."""
        return self._catalog.state

    @property
    def age_s(self) -> float:
        """How long ago the store last said whether there is anything new."""
        return time.monotonic() - self._answered_s

    async def ask(self, question: Callable[[CatalogState], T]) -> T:
        """Ask the last view; partitions that the question needs are read first, off the event loop.

        Raises Unavailable if the store does not answer.
        """
        while True:
            try:
                return question(self.state)
            except PartitionsNotRead as missing:
                await self._read_partitions(missing.numbers)

    async def find(self, question: Callable[[CatalogState], T], name: Name | None = None) -> T:
        """Ask the last view; where it knows no such key or model, ask a newer view.

        name: a model that the newer view lacks too is taken to be missing for MISSING_S. Raises
        InvalidKey and UnknownModel, and Unavailable if there may be a newer view that cannot be
        read.
        """
        try:
            return await self.ask(question)
        except (InvalidKey, UnknownModel) as error:
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
        """Ask a view as from `refresh`, in a thread: for long lists.

        Raises StoreError if partitions that it needs cannot be read.
        """
        await self.refresh()
        return await self.in_thread(self._catalog.ask, question)

    async def in_thread(self, work: Callable[[A], T], argument: A) -> T:
        """Do work that takes long in one of the threads for it."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, argument)

    async def start(self) -> None:
        """Read the catalog, or begin with the view that was kept, or with none and go on asking.

        Raises StoreRefused if the store answers, and refuses, or holds no catalog, and no view was
        kept.
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
        """Keep each new view in the file as long as the store confirms it, until cancelled."""
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
        """Refresh every interval, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def refresh(self) -> CatalogState:
        """Return a view read after this call, or the last one if the store does not answer."""
        await self._read()
        return self.state

    async def refresh_or_raise(self) -> CatalogState:
        """Return a view read after this call. Raises Unavailable if the store does not answer."""
        if not await self._read():
            raise Unavailable(
                "what this request names is not known here, and the catalog cannot be read now: "
                "send it again later",
                retry_after_s=STORE_AWAY_S,
            )
        return self.state

    async def _read_partitions(self, numbers: Collection[int]) -> None:
        """Read these partitions, each once for all who wait for it."""
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
        """Refresh; return whether that worked in time. All who call before it begins share it."""
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
            except Exception as error:  # whatever it is, the last view serves on
                if self._failure is None:
                    log.warning("catalog_unreachable", extra={"error": repr(error)})
                self._failure = error
                return False
            if self._failure is not None:
                log.info("catalog_reachable", extra={"seq": self.state.seq})
            self._failure = None
            self._answered_s = time.monotonic()
            return True


class _NegativeCache:
    """Names that were not found, for MISSING_S, and few of them."""

    def __init__(self) -> None:
        self._until: dict[Name, float] = {}

    def add(self, name: Name) -> None:
        if len(self._until) >= _MOST_MISSING:
            self._until.clear()
        self._until[name] = time.monotonic() + MISSING_S

    def holds(self, name: Name | None) -> bool:
        return name is not None and self._until.get(name, 0.0) > time.monotonic()
