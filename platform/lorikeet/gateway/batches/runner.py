"""Runs of batches in a gateway: each line is answered once idle capacity allows, and committed.

A gateway looks for open batches that no gateway runs, and claims one by a lease in the store. It
answers lines at low priority, commits results in parts, and at the end writes the output. If it is
killed, another gateway takes the lease over: the lines of committed parts are done, the others are
answered again, and the output has each line once (batch_store.py). The lease saves work; the
output would be right without it.
"""

import asyncio
import hashlib
import json
import logging
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from starlette.types import ASGIApp

from lorikeet.batch_store import (
    CANCELLING,
    ENDED,
    FINALIZING,
    VALIDATED,
    BatchRecord,
    BatchStore,
    Result,
)
from lorikeet.errors import NotFound, StoreError
from lorikeet.file_store import FileStore
from lorikeet.gateway.batches.line_answers import Answered, answer_line
from lorikeet.gateway.batches.lines import Json, Line, check_lines, error_json, read_lines
from lorikeet.gateway.error_responses import OK

log = logging.getLogger(__name__)
T = TypeVar("T")

SCAN_S = 20.0
"""Seconds between two looks for batches to run."""
WATCH_S = 5.0
"""Seconds between two looks of a run at its batch, which may be cancelled or have expired."""
DEAD_S = 45.0
"""Seconds after which the gateway of a lease that was not renewed counts as dead."""
FLUSH_S = 2.0
"""Shortest time in seconds between two parts of results."""
LONGEST_FLUSH_S = 60.0
_FLUSH_SHARE = 0.02
"""Share of a run's time that lies between two parts: long runs have no thousands of parts."""
MAX_RUNS = 8
"""Limit on the batches that a gateway runs at once, one for each tenant."""
MAX_PENDING_BYTES = 64 * 2**20
"""Limit on a run's bytes of lines in flight and of results that no part has yet."""
_AGAIN = frozenset(
    ("rate_limit_exceeded", "overloaded", "unavailable", "store_error", "adapter_not_ready")
)
"""Codes of errors that say nothing of the line: it is sent again until the batch expires."""
_ATTEMPTS = 5
"""Number of times that a line is sent if the service fails in another way."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_COMPLETED, _ELSEWHERE = "completed", "elsewhere"
_UNDONE = {
    "expired": "the batch expired before this request was answered",
    "cancelled": "the batch was cancelled before this request was answered",
}


class BatchRunner:
    """Loop that runs batches in one gateway. For use in one event loop.

    batches: store of batches.
    files: store of their files.
    app: application that answers lines (answer_line).
    at_once: limit on the lines of all batches that are answered at once.
    """

    def __init__(self, batches: BatchStore, files: FileStore, app: ASGIApp, at_once: int) -> None:
        self._batches, self._files, self._app = batches, files, app
        self._slots = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(MAX_RUNS + 2, thread_name_prefix="batches")
        self._runs: dict[str, asyncio.Task[None]] = {}  # by tenant
        self._woken = asyncio.Event()
        # by batch: last lease, its time of renewal, and when they were first seen
        self._seen: dict[str, tuple[str, float, float]] = {}

    def wake(self) -> None:
        """Look for batches to run at once: there is a new one."""
        self._woken.set()

    async def run(self) -> NoReturn:
        """Run batches until cancelled; the results so far are then committed."""
        try:
            while True:
                self._woken.clear()
                try:
                    await self._scan()
                except StoreError as error:
                    log.warning("batches_not_read", extra={"error": str(error)})
                with suppress(TimeoutError):
                    async with asyncio.timeout(SCAN_S):
                        await self._woken.wait()
        finally:
            running = list(self._runs.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _scan(self) -> None:
        """Claim and run the oldest batch, that nobody runs, of each tenant without a run here."""
        waiting = defaultdict[str, list[str]](list)
        for tenant, batch_id in await self._in_thread(self._batches.open_batches):
            waiting[tenant].append(batch_id)
        self._seen = {key: seen for key, seen in self._seen.items() if self._is_open(key, waiting)}
        tenants = [tenant for tenant in waiting if tenant not in self._runs]
        for tenant in random.sample(tenants, len(tenants)):
            for batch_id in waiting[tenant]:
                if len(self._runs) >= MAX_RUNS:
                    return
                run = await self._in_thread(partial(self._claim, tenant, batch_id))
                if run is not None:
                    self._runs[tenant] = asyncio.create_task(self._run(tenant, batch_id, run))
                    break

    @staticmethod
    def _is_open(key: str, waiting: dict[str, list[str]]) -> bool:
        tenant, _, batch_id = key.partition("/")
        return batch_id in waiting.get(tenant, ())

    def _claim(self, tenant: str, batch_id: str) -> int | None:
        """Claim a batch unless it runs elsewhere; return the number of the run, or None."""
        last, now_s = self._batches.last_lease(tenant, batch_id), time.monotonic()
        if last is not None:
            at = f"{tenant}/{batch_id}"
            key, modified, since_s = self._seen.get(at, ("", 0.0, 0.0))
            if (key, modified) != (last.key, last.modified):
                self._seen[at] = last.key, last.modified, now_s
                return None
            if now_s - since_s < DEAD_S:
                return None
        return self._batches.claim(tenant, batch_id, last)

    async def _run(self, tenant: str, batch_id: str, run: int) -> None:
        facts = {"tenant": tenant, "batch": batch_id, "run": run}
        log.info("batch_run_begun", extra=facts)
        try:
            batch = await self._in_thread(lambda: self._batches.batch(tenant, batch_id))
            with tempfile.TemporaryDirectory(prefix="lorikeet-batch-") as folder:
                await _Run(self, batch, run, Path(folder)).complete()
        except NotFound:  # `lorikeet gc` has deleted it
            await self._in_thread(partial(self._batches.clear, tenant, batch_id))
        except StoreError as error:
            log.warning("batch_run_failed", extra=facts | {"error": str(error)})
        except Exception:
            log.exception("batch_run_failed", extra=facts)
        else:
            log.info("batch_run_ended", extra=facts)
        finally:
            del self._runs[tenant]
            self.wake()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class _Run:
    """Run of one batch.

    number: number of the run, which its lease has.
    folder: empty folder for the input and the output.
    """

    def __init__(self, runner: BatchRunner, batch: BatchRecord, number: int, folder: Path) -> None:
        self._runner, self._batch, self._number, self._folder = runner, batch, number, folder
        self._batches, self._files = runner._batches, runner._files
        self._in_thread = runner._in_thread
        self._input = folder / "input"
        self._results = list[Result]()
        self._parts, self._pending_bytes, self._begun_s = 0, 0, time.monotonic()
        self._room = asyncio.Condition()

    async def complete(self) -> None:
        """Run the batch to its end, or until another gateway runs it. Raises StoreError."""
        batch = self._batch
        if await self._mark(ENDED) is not None:
            await self._in_thread(partial(self._batches.clear, batch.tenant, batch.id))
            return
        reason = await self._reason_to_stop()
        if reason is None:
            if not await self._check_input():
                return
            reason = await self._answer_until_stopped()
        if reason != _ELSEWHERE:
            await self._in_thread(partial(self._finish, reason))

    async def _check_input(self) -> bool:
        """Download the input and check it unless that was done; return whether it is right. A batch
        with a wrong input ends as failed.
        """
        batch = self._batch

        def check() -> bool:
            try:
                self._files.download(batch.tenant, batch.input_file_id, self._input)
            except NotFound as error:
                self._fail([error_json(error.code, error.message, "input_file_id", None)])
                return False
            if self._batches.mark(batch, VALIDATED) is None:
                total, errors = check_lines(self._input, batch.endpoint)
                if errors:
                    self._fail(errors)
                    return False
                self._batches.set_mark(batch, VALIDATED, total=total)
            return True

        return await self._in_thread(check)

    def _fail(self, errors: list[Json]) -> None:
        shown = {"object": "list", "data": errors}
        self._batches.end(self._batch, "failed", errors=shown)

    async def _answer_until_stopped(self) -> str:
        """Answer the lines that are not done.

        Return the batch's status from now on, or _ELSEWHERE if another gateway runs the batch.
        """
        done = await self._in_thread(
            lambda: {result.number for result in self._batches.results(self._batch)}
        )
        answering = asyncio.create_task(self._answer_all(done))
        watching = asyncio.create_task(self._watch())
        keeping = asyncio.create_task(self._keep())
        tasks = answering, watching, keeping
        try:
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()  # raises an error of the store, or of ours
                return _COMPLETED
            return watching.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.shield(self._commit())

    async def _answer_all(self, done: set[int]) -> None:
        lines = (line for line in read_lines(self._input) if line.number not in done)
        slots = self._runner._slots
        async with asyncio.TaskGroup() as group:
            while (line := await self._in_thread(lambda: next(lines, None))) is not None:
                await self._take_room(len(line.body))
                await slots.acquire()
                task = group.create_task(self._answer(line))
                task.add_done_callback(lambda _: slots.release())

    async def _answer(self, line: Line) -> None:
        """Answer a line and add its result."""
        answered = await self._answered(line)
        shown = _result_json(self._batch, line, answered)
        result = Result(line.number, answered.status == OK, shown)
        self._results.append(result)
        self._pending_bytes += len(result.line)
        await self._give_room(len(line.body))

    async def _answered(self, line: Line) -> Answered:
        wait_s, failures = _FIRST_WAIT_S, 0
        while True:
            answered = await answer_line(self._runner._app, self._batch, line.body)
            code = answered.code
            failures += code not in _AGAIN
            if code is None or (code not in _AGAIN and answered.status < 500):
                return answered
            if failures == _ATTEMPTS:
                return answered
            await asyncio.sleep(max(wait_s, answered.retry_after_s or 0.0) * random.uniform(1, 1.2))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _watch(self) -> str:
        """Renew the lease until there is a reason to stop, and return it."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                reason = await self._reason_to_stop()
            except StoreError:
                continue
            if reason is not None:
                return reason

    async def _reason_to_stop(self) -> str | None:
        batch = self._batch

        def reason() -> str | None:
            if not self._batches.renew(batch, self._number):
                return _ELSEWHERE
            if self._batches.mark(batch, CANCELLING) is not None:
                return "cancelled"
            return "expired" if self._batches.clock() >= batch.expires_at else None

        return await self._in_thread(reason)

    async def _keep(self) -> NoReturn:
        """Commit results from time to time."""
        while True:
            ran_s = time.monotonic() - self._begun_s
            await asyncio.sleep(min(max(FLUSH_S, _FLUSH_SHARE * ran_s), LONGEST_FLUSH_S))
            try:
                await self._commit()
            except StoreError as error:
                log.warning("batch_part_not_written", extra={"error": str(error)})

    async def _commit(self) -> None:
        """Write the results since the last part as a part. Raises StoreError and keeps them."""
        results = self._results
        if not results:
            return
        self._results = []
        number, self._parts = self._parts, self._parts + 1
        try:
            await self._in_thread(
                lambda: self._batches.put_part(self._batch, self._number, number, results)
            )
        except BaseException:
            self._results = results + self._results
            raise
        await self._give_room(sum(len(result.line) for result in results))

    async def _take_room(self, size: int) -> None:
        async with self._room:
            await self._room.wait_for(
                lambda: not self._pending_bytes or self._pending_bytes + size <= MAX_PENDING_BYTES
            )
            self._pending_bytes += size

    async def _give_room(self, size: int) -> None:
        async with self._room:
            self._pending_bytes -= size
            self._room.notify_all()

    async def _mark(self, name: str) -> dict[str, object] | None:
        return await self._in_thread(lambda: self._batches.mark(self._batch, name))

    def _finish(self, status: str) -> None:
        """Write the output and the errors, then end the batch. Raises StoreError."""
        batch, batches = self._batch, self._batches
        total = (batches.mark(batch, VALIDATED) or {}).get("total", 0)
        begun = batches.set_mark(batch, FINALIZING)
        paths = {True: self._folder / "output", False: self._folder / "errors"}
        counts, done = {True: 0, False: 0}, set[int]()
        with paths[True].open("wb") as output, paths[False].open("wb") as errors:
            for result in batches.results(batch):
                (output if result.ok else errors).write(result.line + b"\n")
                counts[result.ok] += 1
                done.add(result.number)
            for line in self._undone(done, total):
                errors.write(_undone_json(batch, line, status) + b"\n")
                counts[False] += 1
        ids = {}
        for ok, name in ((True, "output"), (False, "errors")):
            if counts[ok]:
                file_id = f"file-{begun['ms']:012x}{batch.id[-12:]}-{name}"
                shown = f"{batch.id}_{name}.jsonl"
                lifetime_s = batch.output_lifetime_s
                made = self._files.add(batch.tenant, paths[ok], shown, lifetime_s, file_id)
                ids[ok] = made.id
        batches.end(
            batch,
            status,
            output_file_id=ids.get(True),
            error_file_id=ids.get(False),
            request_counts={"total": total, "completed": counts[True], "failed": counts[False]},
        )

    def _undone(self, done: set[int], total: int) -> Iterator[Line]:
        """Yield the lines that are not done."""
        if len(done) == total:
            return
        if not self._input.exists():
            self._files.download(self._batch.tenant, self._batch.input_file_id, self._input)
        yield from (line for line in read_lines(self._input) if line.number not in done)


def _result_json(batch: BatchRecord, line: Line, answered: Answered) -> bytes:
    """Return a line of the output or the errors, as OpenAI documents it."""
    head = json.dumps({"id": _result_id(batch, line), "custom_id": line.custom_id})
    response = json.dumps({"status_code": answered.status, "request_id": answered.request_id})
    return (
        f'{head[:-1]}, "response": {response[:-1]}, "body": '.encode()
        + answered.body
        + b'}, "error": null}'
    )


def _undone_json(batch: BatchRecord, line: Line, status: str) -> bytes:
    error = {"code": f"batch_{status}", "message": _UNDONE[status]}
    result = {"id": _result_id(batch, line), "custom_id": line.custom_id}
    return json.dumps(result | {"response": None, "error": error}).encode()


def _result_id(batch: BatchRecord, line: Line) -> str:
    digest = hashlib.sha256(f"{batch.id}:{line.number}".encode()).hexdigest()
    return f"batch_req_{digest[:24]}"
