"""Copies of KV pages, and of states of delta nets, between a rank's device, its host memory and its
disk.

On CUDA no step waits for a copy:

    computing   gather pages into a half │ step that writes to these pages │ …
    storing              copy the half to the host   │ (then the half may be filled again)
    fetching    copy pages from the host to a buffer │ copy more to another buffer │ …
    scattering                                       │ scatter the first into pages │ …

A page that is stored is first gathered into one of two halves of a buffer on the device, right
before the step that may write to it. The leading rank stores pages only if a half is free; the
others are dropped. A fetch scatters pages behind all steps launched so far, since the last one may
still read what was in those pages. The host waits for its end before a step reads the pages: on a
thread, or if the step has nothing else to compute (Fetch.in_step) right before its launch.

A page's row on the host ends with the checksum (checksums.py) of its words, which is computed on
the device when the page is stored, and again when it is fetched.

With a file on the disk (page_file.py), threads write rows to it, one batch at a time, and a fetch
reads the rows of each part right before it copies the part to the device.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch

from lorikeet_engine.device.async_copies import Download, upload
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.execution.page_file import PageFile
from lorikeet_engine.parallel.followers import Followers, for_good
from lorikeet_engine.residency.host_arena import host_memory
from lorikeet_engine.residency.workers import Workers
from lorikeet_engine.scheduling.host_pages import DiskCopy, Fetch, HostPages, PageCopy
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.settings import EngineSettings

log = logging.getLogger(__name__)

_WORD = torch.int64
_HALF_BYTES = 256 << 20
_PART_BYTES = 32 << 20
_RUN_BYTES = 8 << 20  # of one copy on the bus, behind which small copies of steps may have to wait
_AT_ONCE_BYTES = 272 << 20  # 5 ms of the bus, as for adapters (residency/gpu/image_copies.py)
_PARTS_UNDER_WAY = 2
_STATES_AT_ONCE = 4  # stored before one step
_ABANDON_S = 10.0
_WRITE_BYTES = 64 << 20  # of one batch to the disk


@dataclass(frozen=True, slots=True)
class AllocateHostPages:
    """Command to allocate a rank's host memory for KV pages, and to find the largest number of
    pages that all ranks have room for.
    """


@dataclass(frozen=True, slots=True)
class StorePages:
    """Command to copy pages, and states of delta nets, to the host before the next step."""

    copies: tuple[PageCopy, ...]
    states: tuple[PageCopy, ...]


@dataclass(frozen=True, slots=True)
class FetchPages:
    """Command to copy pages, and states of delta nets, to the device, and to report how many are
    damaged.

    number: identifies the copy in reports; negative, since other numbers are of copies of adapters.
    reads, state_reads: those that are first read from the disk.
    """

    number: int
    copies: tuple[PageCopy, ...]
    states: tuple[PageCopy, ...]
    reads: tuple[DiskCopy, ...] = ()
    state_reads: tuple[DiskCopy, ...] = ()

    def prepare(self, memory: "RankMemory") -> Callable[[], int]:
        """Return a function that does this for one rank, as RankPages.fetch does."""
        runs = [memory.pages.fetch(self.copies, self.reads)]
        if self.states:
            assert memory.states is not None, "a state without host memory"
            runs.append(memory.states.fetch(self.states, self.state_reads))
        return lambda: sum([run() for run in runs])


@dataclass(frozen=True, slots=True)
class WritePages:
    """Command to write pages, and states of delta nets, from host memory to the disk, and to report
    1 if that fails, else 0.

    number: identifies the writing in reports, as in FetchPages.
    """

    number: int
    copies: tuple[DiskCopy, ...]
    states: tuple[DiskCopy, ...]

    def prepare(self, memory: "RankMemory") -> Callable[[], int]:
        """Return a function that does this for one rank, as RankPages.write does."""
        runs = [memory.pages.write(self.copies)]
        if self.states:
            assert memory.states is not None, "a state without host memory"
            runs.append(memory.states.write(self.states))
        return lambda: sum([run() for run in runs])


class _Part(NamedTuple):
    """Tensor on the device, and its columns in the rows of pages.

    words: the tensor as [pieces, pages, words].
    begin, end: columns, which may end with padding.
    """

    words: torch.Tensor
    begin: int
    end: int

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """View the tensor's columns of rows as [rows, pieces, words]."""
        pieces, _, words = self.words.shape
        columns = rows[:, self.begin : self.end].view(self.words.dtype)
        return columns[:, : pieces * words].view(len(rows), pieces, words)


class RankPages:
    """Host memory of one rank for KV pages or for states of delta nets, and copies to and from it.

    tensors: the pages on the device, each [pieces, pages, words] (`page_words`, `state_words`).
    host: memory of host_memory (residency/host_arena.py), int64: a row of words for each page, and
        its checksum at the end.
    file: file on the disk for rows; None without one.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], host: torch.Tensor) -> None:
        self.file: PageFile | None = None
        self.device = tensors[0].device
        self._parts, end = list[_Part](), 0
        for words in tensors:
            begin, end = end, end + _row_words(words)
            self._parts.append(_Part(words, begin, end))
        self._memory = host  # stays page-locked as long as this very tensor exists
        self._host = host.view(-1, end + 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of a page's row on the host."""
        return self._host.shape[1] * _WORD.itemsize

    @property
    def room(self) -> int:
        """Number of pages that can be stored now."""
        return len(self._host)

    def store(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages to the host. Steps launched afterwards may write to the pages."""
        for slot, page in copies:
            row = self._host[slot : slot + 1]
            for part in self._parts:
                part.of(row)[0] = part.words[:, page]
            row[0, -1] = row[0, :-1].sum()

    def fetch(
        self, copies: Sequence[PageCopy], reads: Sequence[DiskCopy] = ()
    ) -> Callable[[], int]:
        """Prepare a copy of pages to the device, to run after all steps launched so far.

        Returns a function that copies, waits for the end and returns the number of damaged pages:
        those with a wrong checksum, and rows of other pages in the file. With a file or on CUDA it
        is to be called on another thread.

        reads: pages to read from the file into their slots before.
        """
        return partial(self._fetch, copies, reads)

    def begin(self, copies: Sequence[PageCopy]) -> Callable[[], int]:
        """Begin to copy pages to the device, after all steps launched so far.

        Returns a function that waits for the end and returns the number of damaged pages.
        """
        return self.fetch(copies)

    def write(self, copies: Sequence[DiskCopy]) -> Callable[[], int]:
        """Prepare to write to the file the pages that all stores launched so far have brought.

        Returns a function that writes and returns 0, to be called on another thread. It may raise
        OSError.
        """
        return partial(self._write, copies)

    def _write(self, copies: Sequence[DiskCopy]) -> int:
        for place, slot, key in copies:
            assert self.file is not None, "pages written without a file"
            self.file.write(place, key, self._host[slot])
        return 0

    def _read(self, copies: Sequence[PageCopy], reads: Mapping[int, DiskCopy]) -> int:
        """Read from the file the pages that are not in their slots yet; return the number of those
        that it does not have.

        reads: such pages, by their slots.
        """
        lost = 0
        for slot, _ in copies:
            if slot in reads:
                assert self.file is not None, "pages read without a file"
                place, _, key = reads[slot]
                lost += not self.file.read(place, key, self._host[slot])
        return lost

    def _fetch(self, copies: Sequence[PageCopy], reads: Sequence[DiskCopy]) -> int:
        damaged = self._read(copies, _by_slot(reads))
        for slot, page in copies:
            row = self._host[slot : slot + 1]
            damaged += int(row[0, :-1].sum() != row[0, -1])
            for part in self._parts:
                part.words[:, page] = part.of(row)[0]
        return damaged


class CudaRankPages(RankPages):
    """RankPages on a GPU; the host memory is page-locked."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], host: torch.Tensor, half: int, part: int
    ) -> None:
        """Allocate buffers on the device.

        half: maximum number of pages to store before a step; the buffer for stores has two halves
            of so many pages.
        part: number of pages to copy to the device in one part; there are two buffers for parts.
        """
        super().__init__(tensors, host)
        self._storing = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._fetching = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._scattering = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

        def rows(count: int) -> torch.Tensor:
            return torch.empty(count, self._host.shape[1], dtype=_WORD, device=self.device)

        self._halves, self._part = deque((rows(half), rows(half))), part
        self._run = max(1, _RUN_BYTES // self.row_bytes)
        self._arriving = rows(part), rows(part)
        # By half, in the same order: the end of the last copy from it to the host.
        self._stored: deque[torch.cuda.Event | None] = deque((None, None))
        self._newest_slots: frozenset[int] = frozenset()  # of the last copy to the host
        self.store([PageCopy(0, 0)])  # loads the kernels now, not during requests
        if self.fetch([PageCopy(0, 0)])():
            raise SettingsError("a KV page came back damaged from host memory")

    @property
    def room(self) -> int:
        """Number of pages that can be stored now, without making a step wait."""
        stored = self._stored[0]
        is_free = stored is None or stored.query()  # type: ignore[no-untyped-call]
        return len(self._halves[0]) if is_free else 0

    def store(self, copies: Sequence[PageCopy]) -> None:
        """Launch copies of pages to the host. Steps launched afterwards may write to the pages."""
        half, stored = self._halves[0], self._stored[0]
        self._halves.rotate()
        self._stored.rotate()
        computing = torch.cuda.current_stream(self.device)
        if stored is not None:
            computing.wait_event(stored)
        for begin in range(0, len(copies), self._part):
            some = copies[begin : begin + self._part]
            rows = half[begin : begin + len(some)]
            pages = self._pages_of(some)
            for each in self._parts:
                each.of(rows).copy_(each.words.index_select(1, pages).transpose(0, 1))
            rows[:, -1] = rows[:, :-1].sum(1)
        self._storing.wait_stream(computing)
        with torch.cuda.stream(self._storing):
            for row, slot, count in _runs(copies, self._run):
                into = self._host[slot : slot + count]
                into.copy_(half[row : row + count], non_blocking=True)
        self._stored[1] = self._storing.record_event()
        self._newest_slots = frozenset(copy.slot for copy in copies)

    def fetch(
        self, copies: Sequence[PageCopy], reads: Sequence[DiskCopy] = ()
    ) -> Callable[[], int]:
        """Prepare a copy of pages to the device, after all steps launched so far.

        Returns a function that copies, waits for the end and returns the number of damaged pages.

        reads: pages to read from the file into their slots before.
        """
        most = _PARTS_UNDER_WAY
        if len(copies) * self.row_bytes <= _AT_ONCE_BYTES:
            most = len(copies)
        launch = partial(self._launch, copies, *self._before(copies), _by_slot(reads), most)
        return lambda: launch()()

    def begin(self, copies: Sequence[PageCopy]) -> Callable[[], int]:
        """Launch a copy of pages to the device, all at once, after all steps launched so far."""
        return self._launch(copies, *self._before(copies), {}, len(copies))

    def _before(
        self, copies: Sequence[PageCopy]
    ) -> tuple[torch.cuda.Event, torch.cuda.Event | None]:
        """Return the event after which pages on the device may be written to, and the event after
        which no store writes to the pages' slots; None: none does now.
        """
        launched = torch.cuda.current_stream(self.device).record_event()
        # The last store usually makes room for these very pages: the bus carries both at once.
        newest = not self._newest_slots.isdisjoint(copy.slot for copy in copies)
        return launched, self._stored[newest]

    def write(self, copies: Sequence[DiskCopy]) -> Callable[[], int]:
        """Prepare to write to the file the pages that all stores launched so far have brought."""
        return partial(self._write_behind, copies, self._storing.record_event())

    def _write_behind(self, copies: Sequence[DiskCopy], stores: torch.cuda.Event) -> int:
        stores.synchronize()
        return self._write(copies)

    def _launch(
        self,
        copies: Sequence[PageCopy],
        steps: torch.cuda.Event,
        stores: torch.cuda.Event | None,
        reads: Mapping[int, DiskCopy],
        most: int,
    ) -> Callable[[], int]:
        """Launch copies of pages from the host in parts.

        Returns a function that waits for the end and returns the number of damaged pages.

        steps, stores: events of `_before`.
        reads: pages to read from the file then, by their slots.
        most: number of parts under way above which to wait for the first one's end.
        """
        lost = 0
        under_way, begins = deque[torch.cuda.Event](), range(0, len(copies), self._part)
        if reads and stores is not None:
            stores.synchronize()
        try:
            if stores is not None:
                self._fetching.wait_event(stores)
            self._scattering.wait_event(steps)
            with torch.cuda.stream(self._scattering):
                damaged = torch.zeros((), dtype=_WORD, device=self.device)
                for begin, arriving in zip(begins, cycle(self._arriving), strict=False):
                    if len(under_way) >= most:
                        under_way.popleft().synchronize()
                    if len(under_way) >= len(self._arriving):
                        self._fetching.wait_event(under_way[-len(self._arriving)])
                    some = copies[begin : begin + self._part]
                    lost += self._read(some, reads)
                    damaged += self._fetch_part(some, arriving)
                    over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    over.record(self._scattering)
                    under_way.append(over)
                result = Download(damaged)
        except BaseException:
            self._end_copies()
            raise

        def wait_for_end() -> int:
            try:
                return int(result.wait()) + lost
            finally:
                self._end_copies()

        return wait_for_end

    def _end_copies(self) -> None:
        """Wait for all copies to the device; after an error, too, since other sequences then get
        the pages.
        """
        self._fetching.synchronize()
        self._scattering.synchronize()

    def _fetch_part(self, copies: Sequence[PageCopy], arriving: torch.Tensor) -> torch.Tensor:
        """Launch copies of pages; return the number of damaged ones, on the device.

        arriving: buffer on the device, with a row for each page or more.
        """
        rows = arriving[: len(copies)]
        with torch.cuda.stream(self._fetching):
            for row, slot, count in _runs(copies, self._run):
                source = self._host[slot : slot + count]
                rows[row : row + count].copy_(source, non_blocking=True)
        self._scattering.wait_stream(self._fetching)
        pages = self._pages_of(copies)
        for each in self._parts:
            each.words.index_copy_(1, pages, each.of(rows).transpose(0, 1))
        return (rows[:, :-1].sum(1) != rows[:, -1]).sum()

    def _pages_of(self, copies: Sequence[PageCopy]) -> torch.Tensor:
        pages = np.array([copy.page for copy in copies], np.int64)
        return upload(pages, self.device)


class RankMemory(NamedTuple):
    """Host memory of one rank for KV pages and for states of delta nets.

    slots, state_slots: numbers of pages and states that all ranks have room for.
    states: None for a model without states.
    places, state_places: numbers of pages and states for which all ranks' files have room; 0
        without files.
    """

    pages: RankPages
    slots: int
    states: RankPages | None = None
    state_slots: int = 0
    places: int = 0
    state_places: int = 0

    @property
    def waits(self) -> bool:
        """Whether fetches and writings take time, so that threads make them."""
        return self.pages.device.type == "cuda" or self.places > 0

    def store(self, copies: Sequence[PageCopy], states: Sequence[PageCopy]) -> None:
        """Copy pages and states to the host. Steps launched afterwards may write to them."""
        if copies:
            self.pages.store(copies)
        if states:
            assert self.states is not None, "a state without host memory"
            self.states.store(states)


class PageCopies:
    """Copies of KV pages between GPU, host memory and disk, in all ranks. For the engine's thread.

    The KV cache's HostPages decide which pages, and which states of delta nets, are copied.

    memory: host memory of this rank.
    page_bytes, state_bytes: bytes of a page and of a state on one GPU.
    """

    def __init__(
        self,
        memory: RankMemory,
        page_bytes: int,
        state_bytes: int,
        followers: Followers | None,
        wake: Callable[[], None],
    ) -> None:
        """Begin without copies.

        followers: processes of the other ranks; None without tensor parallelism.
        wake: called, perhaps on another thread, when a fetch or a writing is over.
        """
        self.memory, self.page_bytes, self.state_bytes = memory, page_bytes, state_bytes
        self._own, self._followers, self._wake = memory.pages, followers, wake
        self._worker = Workers(1, "kv-pages")
        self._waits = memory.waits or followers is not None
        self._under_way: dict[Fetch, Future[int]] = {}
        self._in_step: tuple[Fetch, Callable[[], int]] | None = None
        self._writer = Workers(1, "kv-disk") if memory.places else None
        self._writing: tuple[WritePages, Future[int]] | None = None
        self._disk_fails = False
        self._commands = 0

    @property
    def in_step(self) -> bool:
        """Whether the planned step waits for a fetch."""
        return self._in_step is not None

    def end_in_step(self, cache: KVCache) -> frozenset[int]:
        """Wait for the fetch for which the planned step waits, if there is one.

        Returns the pages on the GPU that it was to bring if any of them is damaged, else none.
        """
        if self._in_step is None:
            return frozenset()
        (fetch, run), self._in_step = self._in_step, None
        future = self._under_way[fetch]
        _set_result(future, run, len(fetch.copies))
        if not future.result():
            return frozenset()  # `before_plan` ends it: the step comes first
        self._end_fetch(fetch, cache)
        return frozenset(copy.page for copy in fetch.copies)

    def before_plan(self, cache: KVCache) -> None:
        """End copies that are over; tell the cache how many pages may be stored in this step."""
        assert cache.host is not None, "copies without host memory"
        for fetch in [each for each, future in self._under_way.items() if future.done()]:
            self._end_fetch(fetch, cache)
        cache.host.room = self._own.room
        if cache.host_states is not None and self.memory.states is not None:
            cache.host_states.room = self.memory.states.room
        if self._writing is not None and self._writing[1].done():
            self._end_writing(cache)
        self._make_disk_room(cache.host, self.page_bytes)
        if cache.host_states is not None:
            self._make_disk_room(cache.host_states, self.state_bytes)
        cache.store_kept()

    def after_plan(self, cache: KVCache) -> None:
        """Begin the copies that the cache chose while a step was planned, before its launch."""
        host = cache.host
        assert host is not None, "copies without host memory"
        copies, states = host.take_to_store(), tuple[PageCopy, ...]()
        if cache.host_states is not None:
            states = cache.host_states.take_to_store()
        if copies or states:
            if self._followers is None:
                self.memory.store(copies, states)
            else:
                self._followers.queue(StorePages(copies, states))
                with for_good():
                    self.memory.store(copies, states)
        for fetch in host.to_fetch:
            self._begin_fetch(fetch)
        host.to_fetch.clear()
        if self._writer is not None:
            self._begin_writing(host, cache.host_states, self._writer)

    def abandon(self) -> bool:
        """Wait at most 10 s for the copies in flight, whose pages nobody will use.

        Returns False if they have not ended, so that they may overwrite later pages.
        """
        if self._in_step is not None:
            fetch, run = self._in_step
            end = partial(_set_result, self._under_way[fetch], run, len(fetch.copies))
            self._worker.submit(end, urgent=True)  # it may hang
        futures = [*self._under_way.values()]
        if self._writing is not None:
            futures.append(self._writing[1])
        ended = not wait(futures, _ABANDON_S).not_done
        self._under_way.clear()
        self._writing = self._in_step = None
        return ended

    def read_s(self, size: int) -> float:
        """Return the seconds that reading so many bytes from the disk is expected to take."""
        return 0.0 if self._own.file is None else self._own.file.read_s(size)

    def close(self) -> None:
        """Begin no more copies."""
        self._worker.close()
        if self._writer is not None:
            self._writer.close()

    def _begin_fetch(self, fetch: Fetch) -> None:
        states, state_reads = tuple[PageCopy, ...](), tuple[DiskCopy, ...]()
        if fetch.state is not None:
            states, state_reads = (fetch.state.copy,), fetch.state.arrival.reads
        number, reads = self._next_number(), fetch.arrival.reads
        command = FetchPages(number, fetch.copies, states, reads, state_reads)
        if fetch.in_step:
            begin = partial(_launched, self._own, fetch.copies)
            self._in_step = fetch, self._of_all_ranks(command, begin)
            self._under_way[fetch] = Future[int]()
            self._wake()  # in case that no step is launched
        else:
            self._under_way[fetch] = self._begin(command, self._worker)

    def _end_fetch(self, fetch: Fetch, cache: KVCache) -> None:
        damaged = self._under_way.pop(fetch).result()
        if damaged:
            log.error("kv_pages_damaged", extra={"pages": damaged})
        cache.end_fetch(fetch, damaged > 0)

    def _begin_writing(self, host: HostPages, states: HostPages | None, writer: Workers) -> None:
        pages = host.begin_writes()
        of_states = () if states is None else states.begin_writes()
        if pages or of_states:
            command = WritePages(self._next_number(), pages, of_states)
            self._writing = command, self._begin(command, writer)

    def _end_writing(self, cache: KVCache) -> None:
        """Let pages that are written to the disk be replaced in host memory.

        After a failure nothing more is written.
        """
        assert self._writing is not None
        (command, future), self._writing = self._writing, None
        failed = future.result() > 0
        if failed and not self._disk_fails:
            self._disk_fails = True
            log.error("kv_disk_given_up")
        assert cache.host is not None
        cache.host.end_writes(command.copies, failed=failed)
        if cache.host_states is not None:
            cache.host_states.end_writes(command.states, failed=failed)

    def _make_disk_room(self, host: HostPages, page_bytes: int) -> None:
        if host.disk is not None:
            is_free = self._writing is None and not self._disk_fails
            host.disk.room = max(1, _WRITE_BYTES // page_bytes) if is_free else 0

    def _next_number(self) -> int:
        self._commands += 1
        return -self._commands

    def _begin(self, command: FetchPages | WritePages, worker: Workers) -> Future[int]:
        """Begin a copy in all ranks; return the number of damaged pages, or as many as there are
        after an error.
        """
        future = Future[int]()
        run = self._of_all_ranks(command, partial(command.prepare, self.memory))

        def copy() -> None:
            _set_result(future, run, len(command.copies))
            self._wake()

        if self._waits:
            worker.submit(copy, urgent=True)
        else:
            copy()
        return future

    def _of_all_ranks(
        self, command: FetchPages | WritePages, prepare: Callable[[], Callable[[], int]]
    ) -> Callable[[], int]:
        """Send a command to the other ranks, and prepare this rank's part of it.

        Returns a function that ends the part, waits for the other ranks and returns the number of
        damaged pages in all.

        prepare: returns a function that ends this rank's part.
        """
        if self._followers is None:
            return prepare()
        others = self._followers.expect_copy(command.number)
        self._followers.send(command)
        own = prepare()

        def run() -> int:
            try:
                damaged = own()
            finally:  # after an error, too: the other ranks still write to the pages
                of_others = others.wait()
            return damaged + sum(of_others)

        return run


def _launched(pages: RankPages, copies: Sequence[PageCopy]) -> Callable[[], int]:
    """Begin to copy pages to the device; return a function that raises the error if that fails, or
    else ends the copy.
    """
    try:
        return pages.begin(copies)
    except Exception as error:
        failed = Future[int]()
        failed.set_exception(error)
        return failed.result


def _set_result(future: Future[int], run: Callable[[], int], pages: int) -> None:
    """Run a copy, and set its result; after an error, all its `pages` count as damaged."""
    try:
        future.set_result(run())
    except Exception:
        log.exception("kv_pages_not_copied")
        future.set_result(max(1, pages))


def allocate_rank_memory(
    kv: torch.Tensor,
    states: Sequence[torch.Tensor],
    settings: EngineSettings,
    groups: int,
    least: Callable[[int], int],
) -> RankMemory | None:
    """Allocate a rank's host memory for KV pages; in a model with states, half of it for states.

    Returns None, and logs the reason, if a rank's host memory cannot be allocated or holds no page
    or state.

    kv: tensor of the KV pages on the device.
    states: tensors of the states on the device, each [layers, slots, …].
    groups: number of groups of layers.
    least: returns the smallest of the numbers that the ranks pass to it.
    """
    room = settings.kv_host_bytes // settings.tensor_parallel
    of_states = room // 2 if states else 0
    sizes = _buffers(kv[:, :, :1].nbytes, settings, groups)
    pages = _allocate([page_words(kv)], room - of_states, sizes, settings, least)
    kept: tuple[RankPages, int] | tuple[()] | None = ()
    if states:
        sizes = _state_buffers(sum(each[:, :1].nbytes for each in states))
        kept = _allocate(list(map(state_words, states)), of_states, sizes, settings, least)
    if pages is None or kept is None:
        return None
    memory = RankMemory(*pages, *kept)
    return _with_files(memory, settings, least) if settings.kv_disk_bytes else memory


def _with_files(
    memory: RankMemory, settings: EngineSettings, least: Callable[[int], int]
) -> RankMemory:
    """Create a rank's files for pages and states that leave host memory, half of the disk for each.

    Logs the reason, and changes nothing, if a rank has no room for a page or state on its disk.
    """
    own = [memory.pages] if memory.states is None else [memory.pages, memory.states]
    size = settings.kv_disk_bytes // settings.tensor_parallel // len(own)
    places, error = list[int](), "no room for a page, or another rank has no file"
    for pages in own:
        try:
            pages.file = PageFile(settings.cache_dir, size, pages.row_bytes)
        except OSError as failure:
            error = str(failure)
        places.append(least(0 if pages.file is None else pages.file.places))
    if not all(places):
        for pages in own:
            pages.file = None
        facts = {"kv_disk_bytes": settings.kv_disk_bytes, "error": error}
        log.warning("kv_pages_not_on_disk", extra=facts)
        return memory
    pages_of, *states_of = places
    return memory._replace(places=pages_of, state_places=sum(states_of))


def _allocate(
    tensors: Sequence[torch.Tensor],
    size: int,
    buffers: tuple[int, int],
    settings: EngineSettings,
    least: Callable[[int], int],
) -> tuple[RankPages, int] | None:
    """Allocate host memory of at most `size` bytes; return it with the number of rows for which all
    ranks have room.

    buffers: numbers of rows in each half of the buffer for stores, and in that for fetches.
    """
    device, words = tensors[0].device, sum(map(_row_words, tensors)) + 1
    slots = size // (words * _WORD.itemsize)
    on_gpu = device.type == "cuda"
    pages: RankPages | None = None
    error = "no room for a page" if not slots else "another rank has no host memory for pages"
    try:
        host = host_memory(slots * words, _WORD, on_gpu, None, "kv_host_bytes")
        if slots:
            pages = CudaRankPages(tensors, host, *buffers) if on_gpu else RankPages(tensors, host)
    except (SettingsError, RuntimeError, MemoryError) as failure:
        error = str(failure)
        if on_gpu:
            _clear_error(device)
    slots = least(0 if pages is None else slots)
    if pages is None or not slots:
        facts = {"kv_host_bytes": settings.kv_host_bytes, "error": error}
        log.warning("kv_pages_not_on_host", extra=facts)
        return None
    return pages, slots


def _by_slot(reads: Sequence[DiskCopy]) -> dict[int, DiskCopy]:
    return {each.slot: each for each in reads}


def _clear_error(device: torch.device) -> None:
    """Have a kernel report the error that a call without torch has left on this thread.

    CUDA keeps the error until then, and it would fail the first step.
    """
    with suppress(RuntimeError):
        torch.ones((), device=device)


def buffer_bytes(page_bytes: int, state_bytes: int, settings: EngineSettings, groups: int) -> int:
    """Return the bytes that the copies of KV pages and states take on each GPU.

    page_bytes, state_bytes: bytes of a page and of a state on one GPU; state_bytes 0: no states.
    groups: number of groups of layers.
    """
    if not settings.kv_host_bytes or not settings.device.startswith("cuda"):
        return 0
    taken = 0
    buffers = [(page_bytes, _buffers(page_bytes, settings, groups))]
    if state_bytes:
        buffers.append((state_bytes, _state_buffers(state_bytes)))
    for size, (half, part) in buffers:
        taken += (2 * half + 4 * part) * (size + _WORD.itemsize)  # 2 parts for kernels' results
    return taken


def _buffers(page_bytes: int, settings: EngineSettings, groups: int) -> tuple[int, int]:
    """Return the number of pages in each half of the buffer for stores, and in that for fetches."""
    step = groups * -(-settings.max_batch_tokens // settings.page_size)
    half = max(1, min(step, _HALF_BYTES // page_bytes))
    return half, max(1, min(half, _PART_BYTES // page_bytes))


def _state_buffers(state_bytes: int) -> tuple[int, int]:
    """Return the number of states in each half of the buffer for stores, and for fetches."""
    return max(1, min(_STATES_AT_ONCE, _HALF_BYTES // state_bytes)), 1


def page_words(kv: torch.Tensor) -> torch.Tensor:
    """View KV pages as [pieces, pages, words]."""
    return _words(kv.flatten(0, 1).flatten(2))


def state_words(states: torch.Tensor) -> torch.Tensor:
    """View states, [layers, slots, …], as [layers, slots, words]."""
    return _words(states.flatten(2))


def _words(pieces: torch.Tensor) -> torch.Tensor:
    """View the last of three dimensions as integers, of the widest dtype that fits.

    That is the widest of int64, int32, int16 and uint8 whose size divides the dimension's bytes.
    """
    size = pieces.shape[2] * pieces.itemsize
    fitting = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return pieces.view(next(dtype for dtype in fitting if size % dtype.itemsize == 0))


def _row_words(words: torch.Tensor) -> int:
    """Return the number of 8-byte words, with padding, that a tensor's part of a row takes."""
    return -(-words[:, :1].nbytes // _WORD.itemsize)


def _runs(copies: Sequence[PageCopy], most: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the first copy, its slot, number of copies) of runs of consecutive slots.

    most: largest number of copies in a run.
    """
    begin = 0
    for at in range(1, len(copies) + 1):
        is_full = at - begin == most
        if is_full or at == len(copies) or copies[at].slot != copies[at - 1].slot + 1:
            yield begin, copies[begin].slot, at - begin
            begin = at
