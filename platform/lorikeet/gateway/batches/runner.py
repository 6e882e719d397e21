"""Runs of batches in a gateway: each line is answered in the background, and its result committed.

A gateway looks for open batches that no gateway runs, and claims one by a lease in the store. It
answers the lines, commits results in parts, and at the end writes the output. If the gateway is
killed, another gateway claims the batch and answers the lines that no part has. The output has each
line once even if two gateways run a batch (batch_store.py): leases only save work.
"""

import asyncio
import hashlib
import json
import logging
import os
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import add
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
from starlette.types import ASGIApp

from lorikeet.batch_store import (
    CANCELLING,
    ENDED,
    FINALIZING,
    VALIDATED,
    BatchRecord,
    BatchStore,
    LineTokens,
    Result,
)
from lorikeet.errors import LorikeetError, NotFound, ReplicasLost, StoreError
from lorikeet.file_store import FileStore
from lorikeet.gateway.batches.line_answers import Answered, answer_line
from lorikeet.gateway.batches.line_turns import LineTurns
from lorikeet.gateway.batches.lines import Json, Line, check_lines, error_json, read_lines
from lorikeet.gateway.error_responses import OK

log = logging.getLogger(__name__)
T = TypeVar("T")

SCAN_S = 20.0
"""Seconds between two searches for batches to run."""
WATCH_S = 5.0
"""Seconds between two renewals of a lease, with checks for a cancelled or expired batch."""
DEAD_S = 45.0
"""Seconds without a renewal of its lease after which a gateway counts as dead."""
FLUSH_S, LONGEST_FLUSH_S = 2.0, 60.0
"""Shortest and longest time between two parts of results, seconds."""
_FLUSH_SHARE = 0.02
"""Time between two parts as a share of the run's time so far, so that parts stay few."""
MAX_RUNS = 8
"""Limit on the batches that a gateway runs at once, at most one of each tenant."""
MAX_PENDING_BYTES = 64 * 2**20
"""Limit on a run's bytes of lines in flight and of results that no part has yet."""
PART_BYTES = MAX_PENDING_BYTES // 4
"""Bytes of results at which a part is written before its time."""
MAX_OUTPUT_BYTES = 2 * 2**30
"""Limit on the bytes of a batch's results, which each take the gateway's disk once more at the end;
the batch then fails with the answers so far.
"""
_RETRIED = frozenset(
    ("rate_limit_exceeded", "overloaded", "unavailable", "store_error", "adapter_not_ready")
)
"""Error codes that do not depend on the line, which is sent again until the batch expires."""
_ATTEMPTS, _PATIENCE_S = 8, 900.0
"""Smallest number of times, and seconds, for which a line is sent if its answers have other codes
of 5xx.
"""
_ATTEMPTS_WITH_LOSSES = 3
"""Number of times that a line is sent if replicas are lost with it: it may be what ends them."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_FOLDER = "lorikeet-batch-"  # then the gateway's process id
_UNDONE = {
    "expired": "the batch expired before this request was answered",
    "cancelled": "the batch was cancelled before this request was answered",
    "failed": "the batch failed before this request was answered",
}
_TOO_LARGE = (
    f"the answers take more than {MAX_OUTPUT_BYTES} bytes: make a batch of the requests that the "
    "error file has with the code batch_failed"
)


class BatchRunner:
    """Loop that runs batches in one gateway. For use in one event loop.

    batches: store of batches.
    files: store of their files.
    app: application that answers lines, the requests of batches (answer_line).
    at_once: limit on the lines of all batches that are answered at once.
    lines_of: returns this gateway's part of a tenant's own limit; None: the tenant has none.
    others_run: returns whether this gateway has other requests than lines.
    """

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        app: ASGIApp,
        at_once: int,
        lines_of: Callable[[str], Awaitable[int | None]],
        others_run: Callable[[], bool] = lambda: False,
    ) -> None:
        self.batches, self.files = batches, files
        self._at_once, self._lines_of = at_once, lines_of
        self._app, self._answering = app, asyncio.Semaphore(at_once)
        self._turns = LineTurns(others_run)
        self._threads = ThreadPoolExecutor(MAX_RUNS + 2, thread_name_prefix="batches")
        self._runs: dict[str, asyncio.Task[None]] = {}  # by tenant
        # One output at a time is on the disk, which the gateways of Kubernetes have little of.
        self.finishing = asyncio.Lock()
        self._woken = asyncio.Event()
        # by batch: last lease, its time of renewal, and when they were first seen
        self._seen: dict[str, tuple[str, float, float]] = {}

    def wake(self) -> None:
        """Make the loop search for batches now, as there is a new one."""
        self._woken.set()

    async def run(self) -> NoReturn:
        """Run batches until cancelled, then write the results so far to the store."""
        await self.in_thread(_remove_folders_of_killed)
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

    async def answer(self, batch: BatchRecord, line: Line) -> Answered:
        """Answer a line, once fewer than `at_once` other lines are being answered."""
        async with self._answering:
            return await self._turns.run(answer_line(self._app, batch, line.body))

    async def lines_at_once(self, tenant: str) -> int:
        """Return the limit on a tenant's lines that are answered at once here."""
        with suppress(LorikeetError):  # the catalog cannot be read, and refuses the lines too
            own = await self._lines_of(tenant)
            if own is not None:
                return min(own, self._at_once)
        return self._at_once

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, called on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _scan(self) -> None:
        """Run, for each tenant without a run here, its oldest batch that no gateway runs."""
        waiting = defaultdict[str, list[str]](list)
        for tenant, batch_id in await self.in_thread(self.batches.open_batches):
            waiting[tenant].append(batch_id)
        open_now = {f"{tenant}/{each}" for tenant, ids in waiting.items() for each in ids}
        self._seen = {key: seen for key, seen in self._seen.items() if key in open_now}
        tenants = [tenant for tenant in waiting if tenant not in self._runs]
        for tenant in random.sample(tenants, len(tenants)):
            for batch_id in waiting[tenant]:
                if len(self._runs) >= MAX_RUNS:
                    return
                claimed = await self.in_thread(partial(self._claim, tenant, batch_id))
                if claimed is not None:
                    self._runs[tenant] = asyncio.create_task(self._run(*claimed))
                    break

    def _claim(self, tenant: str, batch_id: str) -> tuple[BatchRecord, int] | None:
        """Claim a batch; return it and the number of the run.

        None: another gateway may be running the batch, or the batch has ended or was deleted.
        """
        last, now_s = self.batches.last_lease(tenant, batch_id), time.monotonic()
        if last is not None:
            at = f"{tenant}/{batch_id}"
            key, modified, since_s = self._seen.get(at, ("", 0.0, 0.0))
            if (key, modified) != (last.key, last.modified):
                self._seen[at] = last.key, last.modified, now_s
                return None
            if now_s - since_s < DEAD_S:
                return None
        run = self.batches.claim(tenant, batch_id, last)
        if run is None:
            return None
        with suppress(NotFound):  # `lorikeet gc` has deleted the batch
            batch = self.batches.batch(tenant, batch_id)
            if self.batches.mark(batch, ENDED) is None:
                return batch, run
        self.batches.clear(tenant, batch_id)
        return None

    async def _run(self, batch: BatchRecord, run: int) -> None:
        facts = {"tenant": batch.tenant, "batch": batch.id, "run": run}
        log.info("batch_run_begun", extra=facts)
        try:
            with tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{os.getpid()}-") as folder:
                await _Run(self, batch, run, Path(folder)).complete()
        except (StoreError, OSError) as error:
            log.warning("batch_run_failed", extra=facts | {"error": str(error)})
        except Exception:
            log.exception("batch_run_failed", extra=facts)
        else:
            log.info("batch_run_ended", extra=facts)
        finally:
            del self._runs[batch.tenant]
            self.wake()


class _Run:
    """Run of one batch.

    number: number of the run, from 1 for each batch, also in the name of its lease, the object in
        the store that shows that a gateway runs the batch.
    folder: empty folder for the input and the output.
    """

    def __init__(self, runner: BatchRunner, batch: BatchRecord, number: int, folder: Path) -> None:
        self._runner, self._batch, self._number, self._folder = runner, batch, number, folder
        self._batches, self._files = runner.batches, runner.files
        self._in_thread = runner.in_thread
        self._input = folder / "input"
        self._results = list[Result]()
        self._parts, self._pending_bytes, self._begun_s = 0, 0, time.monotonic()
        self._result_bytes = self._output_bytes = 0  # without a part; of all results of the batch
        self._room, self._part_full = asyncio.Condition(), asyncio.Event()

    async def complete(self) -> None:
        """Run the batch to its end, or until another gateway runs it.

        Raises StoreError if the store fails.
        """
        errors: Sequence[Json] = ()
        try:
            status = await self._new_status()
            if status is None:
                errors = await self._in_thread(self._input_errors)
                status = "failed" if errors else await self._answer_lines()
                if status == "failed" and not errors:
                    errors = [error_json("output_too_large", _TOO_LARGE, None, None)]
            async with self._runner.finishing:
                await self._in_thread(self._renew)
                await self._in_thread(lambda: self._finish(status, errors))
        except _Superseded:
            return

    def _input_errors(self) -> list[Json]:
        """Download the input; check it unless an earlier run has; return its errors."""
        batch = self._batch
        try:
            self._files.download(batch.tenant, batch.input_file_id, self._input)
        except NotFound as error:
            return [error_json(error.code, error.message, "input_file_id", None)]
        if self._batches.mark(batch, VALIDATED) is not None:
            return []
        models = set[str]()
        total, errors = check_lines(self._input, batch.endpoint, models)
        if not errors:
            model = models.pop() if len(models) == 1 else None
            self._batches.set_mark(batch, VALIDATED, total=total, model=model)
        return errors

    async def _answer_lines(self) -> str:
        """Answer the lines without a result in the store; return the batch's status from now on.

        Raises _Superseded if another gateway runs the batch or has ended it, and then
        commits nothing: the other run answers the same lines.
        """
        sizes = await self._in_thread(
            lambda: {each.number: len(each.line) for each in self._batches.results(self._batch)}
        )
        self._output_bytes = sum(sizes.values())
        tasks = [
            asyncio.create_task(work)
            for work in (self._answer_all(sizes), self._watch(), self._keep_committing())
        ]
        answering, watching, _ = tasks
        try:
            ended, _ = await asyncio.wait(
                (answering, watching), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if watching.cancelled() or watching.exception() is None:
                await _to_the_end(self._commit())
        return (answering if answering in ended else watching).result()

    async def _answer_all(self, done: Collection[int]) -> str:
        """Answer the lines that are not done, several at a time; return the batch's status.

        Begin none once the results have more than MAX_OUTPUT_BYTES: the batch has failed.
        """
        lines = (line for line in read_lines(self._input) if line.number not in done)
        places = asyncio.Semaphore(await self._runner.lines_at_once(self._batch.tenant))
        async with asyncio.TaskGroup() as group:
            while (line := await self._in_thread(lambda: next(lines, None))) is not None:
                if self._output_bytes > MAX_OUTPUT_BYTES:
                    break
                await self._take_room(len(line.body))
                await places.acquire()
                task = group.create_task(self._answer(line))
                task.add_done_callback(lambda _: places.release())
        while self._results and not await self._try_to_commit():
            await asyncio.sleep(FLUSH_S)
        return "completed" if line is None else "failed"

    async def _answer(self, line: Line) -> None:
        """Answer a line and add its result."""
        answered = await self._answered(line)
        shown = _result_json(self._batch, line, answered)
        result = Result(line.number, answered.status == OK, shown, answered.tokens)
        self._results.append(result)
        self._pending_bytes += len(shown)
        self._result_bytes += len(shown)
        self._output_bytes += len(shown)
        if self._result_bytes >= PART_BYTES:
            self._part_full.set()
        await self._give_room(len(line.body))

    async def _answered(self, line: Line) -> Answered:
        """Return the answer to a line, which is sent again while the service is at fault: for codes
        in _RETRIED until the batch ends, else as _is_final says.
        """
        wait_s, failures, begun_s = _FIRST_WAIT_S, 0, time.monotonic()
        while True:
            answered = await self._runner.answer(self._batch, line)
            if answered.code not in _RETRIED:
                failures += 1
                if _is_final(answered, failures, time.monotonic() - begun_s):
                    return answered
            await asyncio.sleep(max(wait_s, answered.retry_after_s or 0.0) * random.uniform(1, 1.2))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _watch(self) -> str:
        """Renew the lease until the batch is cancelled or expires; return the batch's new status.

        Raises _Superseded if another gateway runs the batch or has ended it.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            with suppress(StoreError):
                status = await self._new_status()
                if status is not None:
                    return status

    async def _new_status(self) -> str | None:
        """Renew the lease; return the status of a cancelled or expired batch, None for another.

        Raises _Superseded if another gateway runs the batch or has ended it, StoreError if
        the store fails.
        """

        def status() -> str | None:
            self._renew()
            if self._batches.mark(self._batch, CANCELLING) is not None:
                return "cancelled"
            return "expired" if self._batches.clock() >= self._batch.expires_at else None

        return await self._in_thread(status)

    def _renew(self) -> None:
        """Renew the lease.

        Raises _Superseded if another gateway runs the batch or has ended it, StoreError if
        the store fails.
        """
        if not self._batches.renew(self._batch, self._number):
            raise _Superseded

    async def _keep_committing(self) -> NoReturn:
        """Write new results to the store, from time to time and once they have PART_BYTES, until
        cancelled.
        """
        while True:
            ran_s = time.monotonic() - self._begun_s
            with suppress(TimeoutError):
                wait_s = min(max(FLUSH_S, _FLUSH_SHARE * ran_s), LONGEST_FLUSH_S)
                await asyncio.wait_for(self._part_full.wait(), wait_s)
            if not await self._try_to_commit():
                await asyncio.sleep(FLUSH_S)

    async def _try_to_commit(self) -> bool:
        """Write new results to the store; return False if the store fails."""
        try:
            await _to_the_end(self._commit())
        except StoreError as error:
            log.warning("batch_part_not_written", extra={"error": str(error)})
            return False
        return True

    async def _commit(self) -> None:
        """Write the results since the last part to the store, as a part (an object of results).

        Raises StoreError if the store fails, and keeps the results for the next part.
        """
        results, self._results = self._results, []
        self._part_full.clear()
        if not results:
            return
        size, self._result_bytes = self._result_bytes, 0
        number, self._parts = self._parts, self._parts + 1
        try:
            await self._in_thread(
                lambda: self._batches.put_part(self._batch, self._number, number, results)
            )
        except BaseException:
            self._results = results + self._results
            self._result_bytes += size
            raise
        await self._give_room(size)

    async def _take_room(self, size: int) -> None:
        """Wait until `size` bytes fit into MAX_PENDING_BYTES, or none are pending; count them."""
        async with self._room:
            await self._room.wait_for(
                lambda: not self._pending_bytes or self._pending_bytes + size <= MAX_PENDING_BYTES
            )
            self._pending_bytes += size

    async def _give_room(self, size: int) -> None:
        async with self._room:
            self._pending_bytes -= size
            self._room.notify_all()

    def _finish(self, status: str, errors: Sequence[Json]) -> None:
        """Write the output and the errors of the lines, then end the batch.

        status: the batch's final status.
        errors: errors of the input.

        Raises StoreError if the store fails.
        """
        batch, batches = self._batch, self._batches
        said: Json = {"errors": {"object": "list", "data": errors}} if errors else {}
        checked = batches.mark(batch, VALIDATED)
        if checked is not None:
            begun, total = batches.set_mark(batch, FINALIZING), checked["total"]
            paths = {True: self._folder / "output", False: self._folder / "errors"}
            done, tokens = dict[int, bool](), LineTokens()
            with paths[True].open("wb") as output, paths[False].open("wb") as failed:
                for result in batches.results(batch):
                    (output if result.ok else failed).write(result.line + b"\n")
                    done[result.number] = result.ok
                    tokens = LineTokens(*map(add, tokens, result.tokens))
                for line in self._undone(done, total):
                    failed.write(_undone_json(batch, line, status) + b"\n")
            for ok, path in paths.items():
                if path.stat().st_size:
                    member = "output_file_id" if ok else "error_file_id"
                    said[member] = f"file-{begun['ms']:012x}{batch.id[-12:]}-{path.name}"
                    shown, lifetime_s = f"{batch.id}_{path.name}.jsonl", batch.output_lifetime_s
                    self._files.add(batch.tenant, path, shown, lifetime_s, said[member])
            completed = sum(done.values())
            counts = {"total": total, "completed": completed, "failed": total - completed}
            said |= {"request_counts": counts, "usage": tokens.json()}
            said["model"] = checked.get("model")
        batches.end(batch, status, **said)

    def _undone(self, done: Collection[int], total: int) -> Iterator[Line]:
        """Yield the lines that are not done; none if the input file was deleted.

        done: numbers of the lines that have results.
        total: number of lines in the input.
        """
        if len(done) == total:
            return
        try:
            if not self._input.exists():
                self._files.download(self._batch.tenant, self._batch.input_file_id, self._input)
        except NotFound:
            return
        yield from (line for line in read_lines(self._input) if line.number not in done)


class _Superseded(Exception):
    """Another gateway runs the batch, or has ended it."""


def _remove_folders_of_killed() -> None:
    """Delete the temporary folders of gateways on this machine that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdecimal() and len(pid) < 10 and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end even if cancelled, and raise the cancellation then."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


def _is_final(answered: Answered, attempts: int, sent_s: float) -> bool:
    """Return whether a line keeps this answer, rather than being sent again.

    attempts: number of times that the line was sent, but for answers with codes in _RETRIED.
    sent_s: seconds since the line was sent first.
    """
    if answered.code == ReplicasLost.code:
        return attempts >= _ATTEMPTS_WITH_LOSSES
    return answered.status < 500 or (attempts >= _ATTEMPTS and sent_s >= _PATIENCE_S)


def _result_json(batch: BatchRecord, line: Line, answered: Answered) -> bytes:
    """Return the result of a line as JSON, in the shape that OpenAI documents."""
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
