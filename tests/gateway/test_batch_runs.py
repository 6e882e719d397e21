"""Runs of batches that are cut, taken over and doubled: the output has each line once."""

import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from starlette.types import Receive, Scope, Send

from lorikeet.batch_store import BATCHES, ENDED, OPEN, RUNS, WINDOW_S, BatchRecord, BatchStore
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore, open_store
from lorikeet.errors import ObjectExists, StoreError
from lorikeet.file_store import FileStore
from lorikeet.gateway.batches import runner
from lorikeet.gateway.batches.line_turns import LineTurns
from lorikeet.gateway.batches.runner import BatchRunner

T = TypeVar("T")
CHAT = "/v1/chat/completions"
LINES = 200


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a test in an event loop."""

    @wraps(test)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(test(*given, **named))

    return run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SCAN_S", 0.05)
    monkeypatch.setattr(runner, "WATCH_S", 0.1)
    monkeypatch.setattr(runner, "DEAD_S", 0.4)
    monkeypatch.setattr(runner, "FLUSH_S", 0.02)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "folder":
        return LocalStore(tmp_path / "store")
    url = request.getfixturevalue("s3_bucket")
    return open_store(f"{url}/{time.time_ns()}")


class Service:
    """An application that answers each line with its own text, and counts the lines."""

    def __init__(self, answer_s: float = 0.01) -> None:
        self.answer_s, self.answered, self.running = answer_s, Counter[str](), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        self.running += 1
        try:
            await asyncio.sleep(self.answer_s)
        finally:
            self.running -= 1
        self.answered[json.loads(body)["text"]] += 1
        headers = [(b"x-request-id", b"r")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def stores(store: ObjectStore) -> tuple[BatchStore, FileStore]:
    return BatchStore(store, 9, time.time), FileStore(store, 10**9, time.time)


def make(store: ObjectStore, folder: Path, tenant: str = "acme", count: int = LINES) -> BatchRecord:
    batches, files = stores(store)
    path = folder / "in"
    requests = [
        {"custom_id": str(n), "method": "POST", "url": CHAT, "body": {"text": str(n)}}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, requests)))
    file = files.add(tenant, path, "in.jsonl", 3600)
    now = int(time.time())
    batch = BatchRecord(
        f"batch_{file.id[5:]}",
        tenant,
        f"key of {tenant}",
        CHAT,
        file.id,
        now,
        now + WINDOW_S,
        None,
        3600,
    )
    batches.create(batch)
    return batch


def run(store: ObjectStore, service: Service) -> "asyncio.Task[Any]":
    async def lines_of(tenant: str) -> int | None:
        return {"narrow": 3}.get(tenant)

    return asyncio.create_task(BatchRunner(*stores(store), service, 16, lines_of).run())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def end(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def outputs(
    store: ObjectStore, batch: BatchRecord, folder: Path, status: str = "completed"
) -> list[str]:
    batches, files = stores(store)
    shown = batches.json(batch.tenant, batch.id)
    assert shown["status"] == status
    files.download(batch.tenant, shown["output_file_id"], folder / "out")
    results = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    assert all(each["response"]["body"]["text"] == each["custom_id"] for each in results)
    return sorted((each["custom_id"] for each in results), key=int)


ALL = [str(number) for number in range(LINES)]


@in_loop
async def test_another_gateway_goes_on_after_a_kill(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, service, batches = make(store, tmp_path), Service(0.05), stores(store)[0]

    async def die(self: Any) -> None:
        """Lose the results since the last part, as a killed process does."""

    first = run(store, service)
    await until(lambda: batches.json("acme", batch.id)["request_counts"]["completed"] > 20)
    with monkeypatch.context() as patched:
        patched.setattr(runner._Run, "_commit", die)
        await end(first)
    committed = {result.number for result in batches.results(batch)}
    assert 20 < len(committed) < LINES
    before = service.answered.copy()
    second = run(store, service)
    await until(lambda: batches.mark(batch, ENDED))
    await end(second)
    again = service.answered - before
    assert not again.keys() & set(map(str, committed)), "lines of parts are not answered again"
    assert outputs(store, batch, tmp_path) == ALL


class Unsteady(Service):
    """An application that answers some lines with an overload's error or a failure."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        code, status = random.choices(
            [("", 200), ("overloaded", 503), ("generation_failed", 500)], (85, 7, 8)
        )[0]
        if not code:
            await super().__call__(scope, receive, send)
            return
        headers = [(b"x-request-id", b"r")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        body = json.dumps({"error": {"code": code}}).encode()
        await send({"type": "http.response.body", "body": body})


def run_gateway(folder: Path) -> None:
    async def main() -> None:
        await run(LocalStore(folder), Unsteady(0.1))

    asyncio.run(main())


@pytest.mark.soak
def test_kills_of_gateways_lose_no_line_of_ten_thousand_and_double_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two gateways one or both are killed, again and again."""
    monkeypatch.setattr(runner, "DEAD_S", 3.0)
    monkeypatch.setattr(runner, "_FIRST_WAIT_S", 0.05)
    count, numbers, killed_at, kills = 10_000, random.Random(0), 0, 0
    store, gateways, process = (
        LocalStore(tmp_path),
        list[Any](),
        multiprocessing.get_context("fork"),
    )
    batch, batches = make(store, tmp_path, count=count), stores(store)[0]
    while batches.mark(batch, ENDED) is None:
        while len(gateways) < 2:
            gateways.append(process.Process(target=run_gateway, args=(tmp_path,)))
            gateways[-1].start()
        time.sleep(0.2)
        done = batches.json("acme", batch.id)["request_counts"]["completed"]
        if killed_at + count // 15 <= done < count:
            for gateway in numbers.sample(gateways, numbers.choice((1, 1, 2))):
                gateway.kill()
                gateway.join()
                gateways.remove(gateway)
            killed_at, kills = done, kills + 1
    for gateway in gateways:
        gateway.kill()
        gateway.join()
    assert kills >= 8
    assert outputs(store, batch, tmp_path) == [str(number) for number in range(count)]


@in_loop
async def test_a_gateway_that_ends_in_order_commits_what_it_has_answered(
    store: ObjectStore, tmp_path: Path
) -> None:
    batch, service, batches = make(store, tmp_path), Service(0.05), stores(store)[0]
    first = run(store, service)
    await until(lambda: service.answered.total() > 30)
    await end(first)
    committed = {str(result.number) for result in batches.results(batch)}
    assert committed == service.answered.keys()
    await end(first)


@in_loop
async def test_two_runs_at_once_put_no_line_into_the_output_twice(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first gateway counts as dead but goes on, as after a pause of its machine."""
    batch, service, batches = make(store, tmp_path), Service(0.05), stores(store)[0]
    monkeypatch.setattr(BatchStore, "renew", lambda *_: True)  # nobody renews, nobody gives up
    tasks = run(store, service), run(store, service)
    await until(lambda: batches.mark(batch, ENDED))
    await asyncio.sleep(0.5)
    await end(*tasks)
    assert service.answered.total() > LINES, "some lines were answered by both"
    assert outputs(store, batch, tmp_path) == ALL


@in_loop
async def test_a_gateway_stops_when_another_has_taken_its_batch(
    store: ObjectStore, tmp_path: Path
) -> None:
    batch, service, batches = make(store, tmp_path), Service(1000.0), stores(store)[0]
    first = run(store, service)
    await until(lambda: service.running == 16)
    assert batches.claim("acme", batch.id, batches.last_lease("acme", batch.id)) == 2
    await until(lambda: batches.renew(batch, 2) and not service.running)
    await end(first)
    second = run(store, Service())
    await until(lambda: batches.mark(batch, ENDED))
    await end(first, second)
    assert outputs(store, batch, tmp_path) == ALL


@in_loop
async def test_a_cut_end_is_made_again(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, service = make(store, tmp_path), Service()
    tried = Counter[str]()

    def cut(self: BatchStore, *given: Any, **said: Any) -> None:
        tried["end"] += 1
        raise SystemError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(BatchStore, "end", cut)
        first = run(store, service)
        await until(lambda: tried["end"])
        await end(first)
    second = run(store, service)
    await until(lambda: not store.first(OPEN))
    await end(second)
    assert outputs(store, batch, tmp_path) == ALL
    assert service.answered.total() == LINES
    assert not store.first(f"{RUNS}acme/{batch.id}/part-")


@in_loop
async def test_batches_of_several_tenants_run_side_by_side(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    made = [make(store, tmp_path, tenant, 30) for tenant in ("acme", "globex", "initech")]
    batches, task = stores(store)[0], run(store, Service(0.1))
    await until(lambda: all(batches.mark(batch, "validated") for batch in made))
    assert not any(batches.mark(batch, ENDED) for batch in made)
    await until(lambda: all(batches.mark(batch, ENDED) for batch in made))
    await end(task)


@in_loop
async def test_folders_of_killed_gateways_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    pids = (10**20, ended.pid, os.getpid())  # the first is nobody's
    strange, killed, lives = (tmp_path / f"lorikeet-batch-{pid}-x" for pid in pids)
    for folder in (strange, killed, lives):
        folder.mkdir()
        (folder / "input").write_text("{}")
    task = run(LocalStore(tmp_path / "store"), Service())
    await until(lambda: not killed.exists())
    await end(task)
    assert (lives / "input").exists()
    assert (strange / "input").exists()


@in_loop
async def test_bytes_in_flight_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, service = LocalStore(tmp_path / "store"), Service(0.01)
    batch = make(store, tmp_path, count=50)
    monkeypatch.setattr(runner, "MAX_PENDING_BYTES", 1)
    task = run(store, service)
    await until(lambda: stores(store)[0].mark(batch, ENDED))
    await end(task)
    assert service.answered.total() == 50


@in_loop
async def test_large_results_are_committed_before_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, service = LocalStore(tmp_path / "store"), Service(0.01)
    batch = make(store, tmp_path)
    monkeypatch.setattr(runner, "FLUSH_S", 1000.0)
    monkeypatch.setattr(runner, "MAX_PENDING_BYTES", 4000)
    monkeypatch.setattr(runner, "PART_BYTES", 1000)
    task = run(store, service)
    await until(lambda: stores(store)[0].mark(batch, ENDED))
    await end(task)
    assert outputs(store, batch, tmp_path) == ALL


@in_loop
async def test_a_full_disk_delays_the_end_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, service, finish = LocalStore(tmp_path / "store"), Service(), runner._Run._finish
    batch, failures = make(store, tmp_path), iter(range(2))

    def full(self: Any, *given: Any) -> None:
        if next(failures, None) is not None:
            raise OSError(28, "No space left on device")
        finish(self, *given)

    monkeypatch.setattr(runner._Run, "_finish", full)
    task = run(store, service)
    await until(lambda: stores(store)[0].mark(batch, ENDED))
    await end(task)
    assert service.answered.total() == LINES
    assert outputs(store, batch, tmp_path) == ALL


@in_loop
async def test_a_tenants_lines_at_once_are_bounded_by_its_own_limit(tmp_path: Path) -> None:
    store, service = LocalStore(tmp_path / "store"), Service(0.01)
    batch = make(store, tmp_path, "narrow", 20)
    task, most = run(store, service), 0
    while stores(store)[0].mark(batch, ENDED) is None:
        most = max(most, service.running)
        await asyncio.sleep(0.001)
    await end(task)
    assert most == 3


class Overloaded(Service):
    """An application that is overloaded for each line of acme's."""

    refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["state"]["batch_key"] == "key of acme":
            self.refused += 1
            headers = [(b"x-request-id", b"r")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            body = json.dumps({"error": {"code": "overloaded"}}).encode()
            await send({"type": "http.response.body", "body": body})
        else:
            await super().__call__(scope, receive, send)


@in_loop
async def test_lines_that_wait_to_be_sent_again_hold_up_no_other_tenant(tmp_path: Path) -> None:
    store, service = LocalStore(tmp_path / "store"), Overloaded()
    make(store, tmp_path, "acme")
    task = run(store, service)
    await until(lambda: service.refused >= 16)
    other = make(store, tmp_path, "globex", 30)
    await until(lambda: stores(store)[0].mark(other, ENDED))
    await end(task)


@in_loop
async def test_another_request_waits_for_few_lines_even_if_all_are_answered_at_once() -> None:
    """The request takes ten iterations of the event loop, each of which may answer one line."""
    turns, answers, ended = LineTurns(lambda: False), asyncio.Event(), list[int]()

    async def line(number: int) -> None:
        await answers.wait()
        ended.append(number)

    lines = [asyncio.create_task(in_turns(turns, line(number))) for number in range(300)]
    await asyncio.sleep(0.1)
    answers.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert 0 < len(ended) <= 10
    await asyncio.gather(*lines)
    assert ended == list(range(300)), "in order"


@in_loop
async def test_beside_other_requests_lines_leave_most_of_the_event_loops_time() -> None:
    turns, begun_s = LineTurns(lambda: True), list[float]()

    async def line() -> None:
        for _ in range(5):
            begun_s.append(time.monotonic())
            ends_s = time.thread_time() + 0.005
            while time.thread_time() < ends_s:
                pass
            await asyncio.sleep(0)

    await in_turns(turns, line())
    assert all(later - earlier > 4 * 0.0048 for earlier, later in pairwise(begun_s))


@in_loop
async def test_turns_pass_on_results_errors_and_cancellations() -> None:
    turns, seen = LineTurns(lambda: False), list[str]()

    async def line(end: str) -> str:
        try:
            async with asyncio.timeout(0.05):
                await asyncio.sleep(0 if end != "late" else 1000)
            if end == "stuck":
                await asyncio.Event().wait()
            if end == "fails":
                raise ValueError(end)
        except asyncio.CancelledError:
            seen.append(end)
            raise
        finally:
            await asyncio.sleep(0)
        return end

    ends = ("answered", "fails", "late", "stuck")
    tasks = [asyncio.create_task(in_turns(turns, line(end))) for end in ends]
    await asyncio.wait(tasks[:3])
    tasks[3].cancel()
    await asyncio.wait(tasks)
    assert tasks[0].result() == "answered"
    assert isinstance(tasks[1].exception(), ValueError)
    assert isinstance(tasks[2].exception(), TimeoutError)
    assert tasks[3].cancelled()
    assert seen == ["stuck"]
    early = asyncio.create_task(in_turns(turns, line("never")))
    await asyncio.sleep(0)
    early.cancel()  # while it waits for its first turn, which goes to another
    assert await in_turns(turns, line("answered")) == "answered"
    assert early.cancelled()


async def in_turns(turns: LineTurns, work: Coroutine[Any, Any, T]) -> T:
    return await turns.run(work)


@in_loop
async def test_a_run_stops_if_another_gateway_has_ended_its_batch(
    store: ObjectStore, tmp_path: Path
) -> None:
    """The first gateway cannot renew its lease for so long that another runs the whole batch."""
    batch, service, batches = make(store, tmp_path), Service(1000.0), stores(store)[0]
    first = run(store, service)
    await until(lambda: service.running == 16)
    batches.end(batch, "completed")
    await until(lambda: not service.running)
    await asyncio.sleep(0.3)
    await end(first)
    assert [key.rpartition("/")[2] for key in store.list(f"{RUNS}acme/{batch.id}/")] == [ENDED]


@in_loop
async def test_a_run_whose_batch_has_ended_makes_no_second_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, service = LocalStore(tmp_path / "store"), Service(0.5)
    batch, (batches, files) = make(store, tmp_path), stores(store)
    monkeypatch.setattr(runner, "WATCH_S", 1000.0)
    first = run(store, service)
    await until(lambda: service.running == 16)
    batches.end(batch, "completed")
    await until(lambda: service.answered.total() == LINES and not service.running)
    await asyncio.sleep(0.5)
    await end(first)
    assert files.page("acme", 10, None, "asc", "batch_output") == ([], False)


@pytest.mark.parametrize("status", ["cancelled", "failed"])
@in_loop
async def test_a_lost_input_costs_no_committed_answer(tmp_path: Path, status: str) -> None:
    store, service = LocalStore(tmp_path / "store"), Service(0.05)
    batch, (batches, files) = make(store, tmp_path), stores(store)
    first = run(store, service)
    await until(lambda: batches.json("acme", batch.id)["request_counts"]["completed"] > 20)
    await end(first)
    done = {str(result.number) for result in batches.results(batch)}
    if status == "cancelled":
        batches.cancel("acme", batch.id)
    files.delete("acme", batch.input_file_id)
    second = run(store, service)
    await until(lambda: not store.first(OPEN))
    await end(second)
    shown = batches.json("acme", batch.id)
    counts = {"total": LINES, "completed": len(done), "failed": LINES - len(done)}
    assert (shown["status"], shown["request_counts"]) == (status, counts)
    assert set(outputs(store, batch, tmp_path, status)) == done


@in_loop
async def test_a_cancelled_commit_writes_its_results_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "store")
    batch = make(store, tmp_path, count=16)
    put, begun = BatchStore.put_part, threading.Event()

    def slow(self: BatchStore, *given: Any) -> None:
        begun.set()
        time.sleep(0.3)
        put(self, *given)

    monkeypatch.setattr(BatchStore, "put_part", slow)
    service = Service()
    first = run(store, service)
    await until(begun.is_set)
    await end(first)
    parts = [store.get(key) for key in store.list(f"{RUNS}acme/{batch.id}/part-")]
    numbers = [number for part in parts for number, *_ in json.loads(part.split(b"\n")[0])]
    assert sorted(numbers) == sorted(map(int, service.answered))


@in_loop
async def test_a_store_that_fails_at_the_end_costs_no_second_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, service, put = LocalStore(tmp_path / "store"), Service(), BatchStore.put_part
    batch, failures = make(store, tmp_path), iter(range(5))

    def flaky(self: BatchStore, *given: Any) -> None:
        if next(failures, None) is not None:
            raise StoreError("away")
        put(self, *given)

    monkeypatch.setattr(runner, "FLUSH_S", 0.3)
    monkeypatch.setattr(BatchStore, "put_part", flaky)
    task = run(store, service)
    await until(lambda: stores(store)[0].mark(batch, ENDED))
    await end(task)
    assert service.answered.total() == LINES
    assert outputs(store, batch, tmp_path) == ALL


def test_a_batch_is_made_though_the_stores_replies_are_lost(tmp_path: Path) -> None:
    class Deaf(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> None:
            super().put_if_absent(key, data)
            if key.startswith((BATCHES, OPEN)):
                raise ObjectExists(key)

    store = Deaf(tmp_path / "store")
    batch = make(store, tmp_path)
    assert stores(store)[0].open_batches() == [("acme", batch.id)]
