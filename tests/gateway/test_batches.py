"""Batches by OpenAI's client: run, failed, cancelled, expired, and taken over by other gateways."""

import asyncio
import contextlib
import json
import random
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import CreateEmbeddingResponse

from lorikeet.batch_store import OPEN, RUNS, WINDOW_S
from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import (
    GenerationFailed,
    Overloaded,
    ReplicasLost,
    RequestTooLarge,
    StoreError,
)
from lorikeet.file_store import CONTENTS
from lorikeet.gateway.batches import lines, runner
from lorikeet.protocol.messages import Call, FinalUsage, Refusal
from lorikeet.tenancy import read_limiter
from lorikeet.usage.ledger import UsageLedger
from tests.gateway.conftest import SHAPE, Gateway, Items, chat, repeat, serving
from tests.gateway.official_types import validate_as
from tests.gateway.test_costly_bodies import list_of
from tests.gateway.test_embeddings import EMBEDDINGS
from tests.gateway.test_files import Clock
from tests.gateway.test_heads import scoring
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
ENDED = {"completed", "failed", "cancelled", "expired"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SCAN_S", 0.1)
    monkeypatch.setattr(runner, "WATCH_S", 0.1)
    monkeypatch.setattr(runner, "DEAD_S", 0.5)
    monkeypatch.setattr(runner, "FLUSH_S", 0.05)
    monkeypatch.setattr(runner, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(read_limiter, "READS_PER_MIN", 10**6)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gateway(tmp_path: Path, clock: Clock) -> Iterator[Gateway]:
    with serving(tmp_path, clock=clock) as running:
        yield running


def line(custom_id: str, body: Any = None, **more: Any) -> dict[str, Any]:
    body = chat(content=custom_id) if body is None else body
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | more


def text_of(requests: list[Any]) -> bytes:
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def make(gateway: Gateway, requests: list[Any] | bytes, **more: Any) -> Any:
    client = gateway.openai()
    content = requests if isinstance(requests, bytes) else text_of(requests)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    more = {"endpoint": CHAT, "completion_window": "24h"} | more
    return client.batches.create(input_file_id=file.id, **more)


def ended(gateway: Gateway, batch: Any) -> Any:
    batches = gateway.openai().batches
    assert eventually(lambda: batches.retrieve(batch.id).status in ENDED, 30)
    shown = batches.retrieve(batch.id)
    validate_as("Batch", shown.model_dump())
    return shown


def read(gateway: Gateway, file_id: str) -> list[dict[str, Any]]:
    text = gateway.openai().files.content(file_id).text
    return [json.loads(each) for each in text.splitlines()]


def words_of(result: dict[str, Any]) -> str:
    text: str = result["response"]["body"]["choices"][0]["message"]["content"]
    return text


async def stuck(call: Call) -> Items:
    """Replay an answer that never begins."""
    await asyncio.Event().wait()
    yield Refusal("internal_error", "never")


def test_a_batch_uses_only_the_adapters_of_its_key(gateway: Gateway) -> None:
    _, gateway.keys["acme"] = gateway.catalog.create_key(
        "acme", {Scope.INFER}, adapters=("support",), actor="test"
    )
    models = ("acme/support", "tiny")
    batch = make(gateway, [line(model, chat(model)) for model in models])
    shown = ended(gateway, batch)
    counts = shown.request_counts
    assert (shown.status, counts.completed, counts.failed) == ("completed", 1, 1)


def test_openais_client_runs_a_batch(gateway: Gateway) -> None:
    async def counted(call: Call) -> Items:
        async for item in repeat(call):
            if isinstance(item, bytes):
                yield FinalUsage(5, 2, 3, reasoning_tokens=1)
            yield item

    gateway.engines.replay = counted
    names = [f"line {number}" for number in range(40)]
    batch = make(gateway, [line(name) for name in names], metadata={"for": "test"})
    validate_as("Batch", batch.model_dump())
    assert (batch.status, batch.metadata, batch.usage) == ("validating", {"for": "test"}, None)
    assert batch.expires_at == batch.created_at + WINDOW_S
    done = ended(gateway, batch)
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.error_file_id is None
    results = read(gateway, done.output_file_id)
    assert {each["custom_id"]: words_of(each) for each in results} == {n: n for n in names}
    assert {each["response"]["status_code"] for each in results} == {200}
    assert len({each["response"]["request_id"] for each in results}) == 40
    assert all(each["error"] is None for each in results)
    bodies = [each["response"]["body"] for each in results]
    validate_as("ChatCompletion", bodies[0])
    assert done.model == bodies[0]["model"] == "acme/support"
    assert done.usage.model_dump() == {
        "input_tokens": 40 * 5,
        "input_tokens_details": {"cached_tokens": 40 * 2},
        "output_tokens": 40 * 3,
        "output_tokens_details": {"reasoning_tokens": 40},
        "total_tokens": 40 * 8,
    }
    output = gateway.openai().files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output"
    assert [file.id for file in gateway.openai().files.list(purpose="batch_output")] == [output.id]
    store = gateway.catalog.reader.store
    assert eventually(lambda: not list(store.list(OPEN)))
    assert eventually(lambda: len(list(store.list(RUNS))) == 1), "parts and leases are deleted"


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "one two"}),
        ("/v1/responses", {"model": "tiny", "input": "one two"}),
    ],
)
def test_completions_and_responses_may_be_in_batches(
    gateway: Gateway, endpoint: str, body: dict[str, Any]
) -> None:
    batch = make(gateway, [line("a", body, url=endpoint)], endpoint=endpoint)
    done = ended(gateway, batch)
    (result,) = read(gateway, done.output_file_id)
    name = "Completion" if endpoint == "/v1/completions" else "Response"
    validate_as(name, result["response"]["body"])


def test_texts_are_embedded_in_batches(tmp_path: Path) -> None:
    bodies = [
        {"model": "acme/support", "input": ["hello", "bye"], "dimensions": 2},
        {"model": "tiny", "input": "hello", "encoding_format": "base64"},
        {"model": "tiny", "input": "hello", "dimensions": 10**6},
    ]
    sent, usage = (
        [line(f"{i}", body, url=EMBEDDINGS) for i, body in enumerate(bodies)],
        UsageLedger(),
    )
    with serving(tmp_path, usage=usage, usage_flush_s=600.0) as gateway:
        gateway.engines.replay = scoring(3.0, 4.0, *[0.0] * (SHAPE.hidden - 2))
        done = ended(gateway, make(gateway, sent, endpoint=EMBEDDINGS))
        assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
        results = read(gateway, done.output_file_id)
        answers = {each["custom_id"]: each["response"]["body"] for each in results}
        counts = [each for of_day in usage.take().values() for each in of_day.values()]
        (refused,) = read(gateway, done.error_file_id)
        alone = gateway.post(EMBEDDINGS, bodies[1]).json()
    found = CreateEmbeddingResponse.model_validate(answers["0"])
    assert [each.embedding for each in found.data] == [pytest.approx([0.6, 0.8])] * 2
    assert answers["1"]["data"] == alone["data"]
    tokens = found.usage.total_tokens + alone["usage"]["total_tokens"]
    assert sum(each.flex_prompt_tokens for each in counts) == tokens > 0
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "dimensions"


def test_lines_run_in_the_background_without_a_deadline(gateway: Gateway) -> None:
    ended(gateway, make(gateway, [line("a")]))
    scheduling = gateway.engines.last.scheduling
    assert scheduling.background
    assert scheduling.max_queue_s is None
    assert gateway.post(CHAT, chat()).is_success
    assert not gateway.engines.last.scheduling.background


def test_refused_lines_are_in_the_error_file(gateway: Gateway) -> None:
    unknown = line("unknown", chat("globex/none"))
    batch = make(gateway, [line("fine"), unknown, line("wrong", {"model": "tiny"})])
    done = ended(gateway, batch)
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    assert [each["custom_id"] for each in read(gateway, done.output_file_id)] == ["fine"]
    errors = {each["custom_id"]: each["response"] for each in read(gateway, done.error_file_id)}
    assert errors["unknown"]["status_code"] == 404
    assert errors["unknown"]["body"]["error"]["code"] == "model_not_found"
    assert errors["wrong"]["status_code"] == 400


WRONG: dict[str, tuple[Any, str]] = {
    "not json": (b"{", "invalid_json_line"),
    "deep": (b"[" * 50_000, "invalid_json_line"),
    "many values": (b"[" + b"[]," * 140_000, "request_too_large"),
    "not a number": (b'{"custom_id": NaN}', "invalid_json_line"),
    "half a character": (b'{"custom_id": "\\ud800"}', "invalid_json_line"),
    "no object": (b"[]", "invalid_json_line"),
    "not utf-8": (b'{"custom_id": "\xff"}', "invalid_json_line"),
    "no id": ({"method": "POST"}, "missing_required_parameter"),
    "the same id": (line("first"), "duplicate_custom_id"),
    "method": (line("m", method="GET"), "invalid_method"),
    "url": (line("u", url="/v1/completions"), "mismatched_url"),
    "no body": (line("b", body=[]), "missing_required_parameter"),
    "stream": (line("s", chat(stream=True)), "invalid_request"),
}


def test_errors_of_the_input_name_their_lines(gateway: Gateway) -> None:
    rows = [row for row, _ in WRONG.values()]
    texts = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    content = b"\n".join([json.dumps(line("first")).encode(), b"", *texts])
    done = ended(gateway, make(gateway, content))
    assert done.status == "failed"
    assert done.failed_at >= done.created_at
    found = [(error.line, error.code) for error in done.errors.data]
    assert found == [(number, code) for number, (_, code) in enumerate(WRONG.values(), 3)]
    assert not gateway.engines.calls
    assert done.output_file_id is None


def test_a_file_may_begin_with_a_byte_order_mark(gateway: Gateway) -> None:
    done = ended(gateway, make(gateway, BOM_UTF8 + text_of([line("a"), line("b")])))
    assert done.request_counts.completed == 2


def test_an_empty_input_fails(gateway: Gateway) -> None:
    done = ended(gateway, make(gateway, b"\n \n"))
    assert [error.code for error in done.errors.data] == ["empty_file"]


def test_an_input_with_too_many_lines_fails_without_reading_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "input"
    path.write_bytes(text_of([line("same")]) * 1_000)
    monkeypatch.setattr(lines, "MAX_LINES", 200)
    count, errors = lines.check_lines(path, CHAT)
    assert count == lines.MAX_ERRORS + 1, "it stops at so many errors"
    assert len(errors) == lines.MAX_ERRORS
    path.write_bytes(text_of([line(str(number)) for number in range(1_000)]))
    count, errors = lines.check_lines(path, CHAT)
    assert count == 201
    assert [(error["code"], error["line"]) for error in errors] == [("too_many_requests", 201)]


def test_blank_lines_are_skipped_but_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"\n \n" * 10 + text_of([line("a")]))
    monkeypatch.setattr(lines, "MAX_WITH_BLANK", 21)
    assert lines.check_lines(path, CHAT) == (1, [])
    assert [each.custom_id for each in lines.read_lines(path)] == ["a"]
    path.write_bytes(b"\n" * 22 + text_of([line("a")]))
    count, errors = lines.check_lines(path, CHAT)
    assert (count, [(error["code"], error["line"]) for error in errors]) == (
        0,
        [("too_many_requests", 22)],
    )


def test_a_line_of_many_values_is_refused_unparsed(tmp_path: Path) -> None:
    path = tmp_path / "input"
    many = list_of("[]", lines.MAX_LINE_BYTES - 1000)
    path.write_bytes(json.dumps(line("a", {"x": 0})).replace("0", many, 1).encode())
    began_s = time.thread_time()
    _, errors = lines.check_lines(path, CHAT)
    assert time.thread_time() - began_s < 1.0  # parsing it takes three seconds
    assert [error["code"] for error in errors] == [RequestTooLarge.code]
    most = {"model": "tiny", "prompt": [[1] * 2**17]}
    path.write_text(json.dumps(line("a", most, url="/v1/completions")))
    assert lines.check_lines(path, "/v1/completions") == (1, [])


def test_the_thread_that_reads_a_large_input_leaves_time_to_others(tmp_path: Path) -> None:
    path = tmp_path / "input"
    text = "a" * (lines.MAX_LINE_BYTES // 4)
    path.write_bytes(text_of([line(str(number), {"text": text}) for number in range(4)]))
    for read in (lambda: lines.check_lines(path, CHAT), lambda: list(lines.read_lines(path))):
        began_s, worked_s = time.monotonic(), time.thread_time()
        read()
        took_s, worked_s = time.monotonic() - began_s, time.thread_time() - worked_s
        assert took_s > 2 * worked_s


def test_no_more_batches_are_open_than_a_tenant_may_have(gateway: Gateway) -> None:
    stuck = asyncio.Event()

    async def wait(call: Call) -> Items:
        await stuck.wait()
        async for item in repeat(call):
            yield item

    gateway.engines.replay = wait
    client = gateway.openai()
    file = client.files.create(file=("in.jsonl", text_of([line("a")])), purpose="batch")

    def create(_: int) -> Any:
        with contextlib.suppress(openai.RateLimitError):
            asked = {"endpoint": CHAT, "completion_window": "24h"}
            return client.batches.create(input_file_id=file.id, **asked)
        return None

    with ThreadPoolExecutor(30) as clients:  # a gateway allows 32 reads at once
        made = [batch for batch in clients.map(create, range(100)) if batch is not None]
    assert len(made) == 20
    for batch in made:
        client.batches.cancel(batch.id)


def test_a_tenant_may_have_a_limit_of_its_own_on_open_batches(gateway: Gateway) -> None:
    gateway.engines.replay = stuck
    gateway.admin("PATCH", "/tenants/acme", {"open_batches": 1})
    first = make(gateway, [line("a")])
    with pytest.raises(openai.RateLimitError, match="it may have 1: wait for one to end, cancel"):
        make(gateway, [line("b")])
    gateway.openai().batches.cancel(first.id)


def test_answers_beyond_the_limit_fail_a_batch_with_the_answers_so_far(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_OUTPUT_BYTES", 1000)
    gateway.admin("PATCH", "/tenants/acme", {"batch_lines": 1})
    names = {f"line {number}" for number in range(20)}
    done = ended(gateway, make(gateway, [line(name) for name in names]))
    assert done.status == "failed"
    assert [error.code for error in done.errors.data] == ["output_too_large"]
    answered = {each["custom_id"] for each in read(gateway, done.output_file_id)}
    undone = {e["custom_id"]: e["error"]["code"] for e in read(gateway, done.error_file_id)}
    assert len(answered) + len(undone) == 20
    assert answered | undone.keys() == names
    assert set(undone.values()) == {"batch_failed"}
    counts = {"total": 20, "completed": len(answered), "failed": len(undone)}
    assert done.request_counts.model_dump() == counts


def test_a_tenant_whose_files_are_beyond_its_quota_makes_no_batch(gateway: Gateway) -> None:
    gateway.admin("PATCH", "/tenants/acme", {"files_bytes": 500})
    first = ended(gateway, make(gateway, [line("a")]))
    with pytest.raises(openai.RateLimitError, match="delete some files") as refused:
        gateway.openai().batches.create(
            input_file_id=first.input_file_id, endpoint=CHAT, completion_window="24h"
        )
    assert refused.value.code == "insufficient_quota"


def test_a_huge_line_is_refused_and_never_whole_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "input"
    path.write_bytes(b"x" * 5000 + b"\n" + text_of([line("a")]) + b"y" * 5000)
    count, errors = lines.check_lines(path, CHAT)
    assert count == 3
    assert [(e["line"], e["code"]) for e in errors] == [(1, "line_too_long"), (3, "line_too_long")]


def test_a_cancelled_batch_keeps_what_was_answered(gateway: Gateway) -> None:
    async def some(call: Call) -> Items:
        answer = stuck(call) if "stuck" in str(call.messages) else repeat(call)
        async for item in answer:
            yield item

    gateway.engines.replay = some
    batch = make(gateway, [line("one"), line("stuck two"), line("three")])
    batches = gateway.openai().batches
    assert eventually(lambda: batches.retrieve(batch.id).request_counts.completed == 2)
    assert batches.retrieve(batch.id).status == "in_progress"
    assert batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended(gateway, batch)
    assert done.status == "cancelled"
    assert done.cancelling_at <= done.cancelled_at
    assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    answered = {each["custom_id"] for each in read(gateway, done.output_file_id)}
    assert answered == {"one", "three"}
    (undone,) = read(gateway, done.error_file_id)
    assert (undone["custom_id"], undone["response"]) == ("stuck two", None)
    assert undone["error"]["code"] == "batch_cancelled"
    with pytest.raises(openai.ConflictError):
        batches.cancel(batch.id)
    assert eventually(lambda: len(gateway.engines.closed) == 3), "the call was aborted"


def test_a_batch_expires_after_its_window(gateway: Gateway, clock: Clock) -> None:
    gateway.engines.replay = stuck
    batch = make(gateway, [line("a"), line("b")])
    assert eventually(lambda: gateway.engines.calls)
    clock.ahead_s = WINDOW_S + 1
    done = ended(gateway, batch)
    assert done.status == "expired"
    assert done.expired_at >= done.expires_at
    codes = [each["error"]["code"] for each in read(gateway, done.error_file_id)]
    assert codes == ["batch_expired"] * 2


def test_a_line_is_sent_again_while_the_service_is_overloaded(gateway: Gateway) -> None:
    tried = Counter[str]()

    async def busy(call: Call) -> Items:
        text = str(call.messages[-1]["content"])
        tried[text] += 1
        if tried[text] < 3:
            raise Overloaded("full", retry_after_s=0.01)
        async for item in repeat(call):
            yield item

    gateway.engines.replay = busy
    done = ended(gateway, make(gateway, [line(str(number)) for number in range(3)]))
    assert done.request_counts.completed == 3
    assert set(tried.values()) == {3}


def test_a_line_that_the_service_fails_waits_longer_each_time(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_FIRST_WAIT_S", 0.05)
    sent_s = list[float]()

    async def broken_at_first(call: Call) -> Items:
        sent_s.append(time.monotonic())
        if len(sent_s) < 4:
            raise GenerationFailed("the step failed")
        async for item in repeat(call):
            yield item

    gateway.engines.replay = broken_at_first
    ended(gateway, make(gateway, [line("a")]))
    waits_s = [after - before for before, after in pairwise(sent_s)]
    assert all(wait_s >= 0.05 * 2**n for n, wait_s in enumerate(waits_s)), waits_s


def test_a_line_that_the_service_fails_for_a_while_is_answered(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken_at_first(call: Call) -> Items:
        if len(gateway.engines.calls) < 20:
            raise GenerationFailed("the step failed")
        async for item in repeat(call):
            yield item

    monkeypatch.setattr(runner, "_LONGEST_WAIT_S", 0.01)
    gateway.engines.replay = broken_at_first
    done = ended(gateway, make(gateway, [line("a")]))
    assert done.request_counts.completed == 1


@pytest.mark.parametrize(
    ("error", "status", "attempts"),
    [(RuntimeError("a bug"), 500, 8), (ReplicasLost("two"), 422, 3)],
)
def test_a_line_that_the_service_always_fails_is_given_up(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, attempts: int
) -> None:
    async def broken(call: Call) -> Items:
        raise error
        yield b""

    monkeypatch.setattr(runner, "_PATIENCE_S", 0.0)
    gateway.engines.replay = broken
    done = ended(gateway, make(gateway, [line("a")]))
    assert done.status == "completed"
    (failed,) = read(gateway, done.error_file_id)
    assert failed["response"]["status_code"] == status
    assert len(gateway.engines.calls) == attempts


def test_lines_are_refused_once_the_batchs_key_has_ended(gateway: Gateway) -> None:
    async def slow(call: Call) -> Items:
        await asyncio.sleep(1.5)
        async for item in repeat(call):
            yield item

    gateway.engines.replay = slow
    record, secret = gateway.catalog.create_key("acme", {Scope.INFER}, actor="test")
    own, gateway.keys["acme"] = gateway.keys["acme"], secret
    batch = make(gateway, [line(str(number)) for number in range(20)])
    gateway.keys["acme"] = own
    assert eventually(lambda: len(gateway.engines.calls) == 16)
    gateway.catalog.revoke_key(record.id, actor="test")
    assert eventually(lambda: gateway.request("GET", "/v1/models", secret).status_code == 401)
    done = ended(gateway, batch)
    assert done.request_counts.model_dump() == {"total": 20, "completed": 16, "failed": 4}
    statuses = [each["response"]["status_code"] for each in read(gateway, done.error_file_id)]
    assert statuses == [401] * 4


def test_batches_are_listed_newest_first(gateway: Gateway) -> None:
    made = [make(gateway, [line("a")]).id for _ in range(3)]
    batches = gateway.openai().batches
    assert [batch.id for batch in batches.list(limit=2)] == made[::-1]
    assert [batch.id for batch in batches.list(after=made[1])] == [made[0]]
    assert list(gateway.openai("globex").batches.list()) == []


@pytest.mark.parametrize(
    ("more", "error", "param"),
    [
        ({"endpoint": "/v1/moderations"}, openai.BadRequestError, "endpoint"),
        ({"completion_window": "1h"}, openai.BadRequestError, "completion_window"),
        ({"input_file_id": "file-" + "0" * 24}, openai.NotFoundError, "input_file_id"),
        ({"input_file_id": "other"}, openai.NotFoundError, "input_file_id"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
            openai.BadRequestError,
            "output_expires_after.seconds",
        ),
    ],
)
def test_a_wrong_batch_is_refused(
    gateway: Gateway, more: dict[str, Any], error: type[openai.APIStatusError], param: str
) -> None:
    file = gateway.openai().files.create(file=("in", text_of([line("a")])), purpose="batch")
    given = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | more
    with pytest.raises(error) as refused:
        gateway.openai().batches.create(**given)
    assert refused.value.param == param


def test_the_output_of_a_batch_cannot_be_the_input_of_another(gateway: Gateway) -> None:
    done = ended(gateway, make(gateway, [line("a")]))
    with pytest.raises(openai.BadRequestError):
        gateway.openai().batches.create(
            input_file_id=done.output_file_id, endpoint=CHAT, completion_window="24h"
        )


def test_the_output_expires_as_the_batch_says(gateway: Gateway) -> None:
    after = {"anchor": "created_at", "seconds": 3600}
    done = ended(gateway, make(gateway, [line("a")], output_expires_after=after))
    output = gateway.openai().files.retrieve(done.output_file_id)
    assert output.expires_at == output.created_at + 3600


def test_a_hundred_batches_at_once_are_refused_beyond_the_limit(gateway: Gateway) -> None:
    gateway.engines.replay = stuck
    client = gateway.openai()
    file = client.files.create(file=("in", text_of([line("a")])), purpose="batch")

    def create() -> Any:
        try:
            return client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
        except openai.RateLimitError:
            return None

    made = [batch for batch in [create() for _ in range(100)] if batch is not None]
    assert len(made) == 20
    assert len(gateway.engines.calls) <= 1, "one batch of a tenant runs at once in a gateway"
    for batch in made:
        client.batches.cancel(batch.id)
    assert all(ended(gateway, batch).status == "cancelled" for batch in made)


def test_a_batch_without_its_input_fails(gateway: Gateway) -> None:
    gateway.engines.replay = stuck
    first = make(gateway, [line("a")])
    second = make(gateway, [line("b")])
    gateway.openai().files.delete(second.input_file_id)
    gateway.openai().batches.cancel(first.id)
    done = ended(gateway, second)
    assert done.status == "failed"
    assert done.errors.data[0].param == "input_file_id"


class Flaky(LocalStore):
    """A store that fails a third of the writes."""

    numbers = random.Random(0)

    def put_if_absent(self, key: str, data: bytes) -> None:
        if key.startswith((RUNS, CONTENTS)) and self.numbers.random() < 1 / 3:
            raise StoreError("away")
        super().put_if_absent(key, data)


def test_a_store_that_fails_delays_a_batch_and_loses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, Flaky(tmp_path / "store")) as gateway:
        names = [f"line {number}" for number in range(50)]
        done = ended(gateway, make(gateway, [line(name) for name in names]))
        assert sorted(e["custom_id"] for e in read(gateway, done.output_file_id)) == sorted(names)
