"""Calls whose replica refuses, breaks or is silent, and calls whose client disconnects."""

import asyncio
import json
import logging
import socket
import time
from pathlib import Path

import httpx
import openai
import pytest

from lorikeet.apis.chat.answer import EventStream
from lorikeet.errors import GenerationFailed, Unavailable
from lorikeet.protocol.messages import Call, Refusal
from tests.gateway.conftest import (
    Gateway,
    Items,
    chat,
    endless,
    header,
    leaving,
    repeat,
    serving,
)
from tests.gateway.test_bad_requests import CHAT, error_of
from tests.waiting import eventually

UPLOAD = "/admin/v1/adapters/acme/support/versions"
STATUSES = {
    "context_length_exceeded": 400,
    "invalid_value": 400,
    "adapter_load_failed": 503,
    "unavailable": 503,
    "generation_failed": 500,
    "adapter_overflows": 422,
    "never_heard_of": 500,
}


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_header", [False, True])
@pytest.mark.parametrize(("code", "status"), STATUSES.items())
def test_a_refusal_before_the_first_byte_has_a_status_of_its_own(
    gateway: Gateway, code: str, status: int, after_header: bool, stream: bool
) -> None:
    async def refuse(call: Call) -> Items:
        if after_header:
            yield header(call)
        yield Refusal(code, "because", "messages")

    gateway.engines.replay = refuse
    answer = gateway.post(CHAT, chat(stream=stream))
    error = error_of(answer, status)
    assert (error["message"], error["param"], error["code"]) == ("because", "messages", code)
    assert ("retry-after" in answer.headers) == (status == 503)


def test_an_engines_error_about_a_chats_prompt_names_messages(gateway: Gateway) -> None:
    async def refuse(call: Call) -> Items:
        yield Refusal("context_length_exceeded", "too long", "prompt")

    gateway.engines.replay = refuse
    assert error_of(gateway.post(CHAT, chat()), 400)["param"] == "messages"


def test_an_error_of_the_engines_has_its_own_status(gateway: Gateway) -> None:
    async def full(call: Call) -> Items:
        raise Unavailable("every replica is full", retry_after_s=2.5)
        yield header(call)

    gateway.engines.replay = full
    answer = gateway.post(CHAT, chat())
    assert error_of(answer, 503)["message"] == "every replica is full"
    assert answer.headers["retry-after"] == "3"


def test_an_unexpected_exception_reveals_nothing(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(call: Call) -> Items:
        yield header(call)
        raise ZeroDivisionError(f"secret insides of {call.messages}")

    gateway.engines.replay = broken
    error = error_of(gateway.post(CHAT, chat()), 500)
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert "insides" not in json.dumps(error)
    (record,) = [r for r in caplog.records if r.msg == "request_failed"]
    assert record.__dict__["request_id"] == gateway.engines.last.request_id
    assert record.__dict__["error"] == "ZeroDivisionError"
    assert "test_failures.py" in record.__dict__["at"]
    assert "hello there" not in str(record.__dict__)


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_ends_without_an_answer_is_a_failure(gateway: Gateway, stream: bool) -> None:
    async def nothing(call: Call) -> Items:
        yield header(call)

    gateway.engines.replay = nothing
    assert error_of(gateway.post(CHAT, chat(stream=stream)), 500)["code"] == "generation_failed"


def test_a_replica_that_takes_over_answers_under_its_own_name(gateway: Gateway) -> None:
    async def second_try(call: Call) -> Items:
        yield header(call)
        async for item in repeat(call):
            yield item

    gateway.engines.replay = second_try
    assert gateway.post(CHAT, chat()).headers["x-lorikeet-replica"] == "replica-7"


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Unavailable("the replica died while answering"), "unavailable"),
        (GenerationFailed("the step failed"), "generation_failed"),
        (ZeroDivisionError("secret insides"), "generation_failed"),
        (Refusal("generation_failed", "the step failed"), "generation_failed"),
    ],
)
def test_a_failure_in_mid_stream_is_an_error_event(
    gateway: Gateway, failure: Exception | Refusal, code: str
) -> None:
    async def fail(call: Call) -> Items:
        yield header(call)
        yield EventStream(call).delta(0, "so far ")
        if isinstance(failure, Refusal):
            yield failure
        else:
            raise failure

    gateway.engines.replay = fail
    stream = gateway.openai().chat.completions.create(**chat(stream=True))
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "so far "]
    with pytest.raises(openai.APIError) as raised:
        next(stream)
    assert raised.value.code == code
    assert "insides" not in str(raised.value)
    raw = gateway.post(CHAT, chat(stream=True)).text
    assert "[DONE]" not in raw


def test_a_silent_replica_times_out_and_is_closed(tmp_path: Path) -> None:
    async def silent(call: Call) -> Items:
        await asyncio.sleep(60)
        yield header(call)

    with serving(tmp_path, first_item_timeout_s=0.1) as gateway:
        gateway.engines.replay = silent
        error = error_of(gateway.post(CHAT, chat()), 503)
        assert "0.1 s" in error["message"]
        assert gateway.engines.closed == [gateway.engines.last.request_id]


def test_slow_generation_is_not_a_silent_replica(tmp_path: Path) -> None:
    async def slow(call: Call) -> Items:
        yield header(call)
        await asyncio.sleep(0.3)
        async for item in repeat(call):
            yield item

    with serving(tmp_path, first_item_timeout_s=0.1) as gateway:
        gateway.engines.replay = slow
        assert gateway.post(CHAT, chat()).status_code == 200


def test_tokens_are_passed_on_as_they_come(gateway: Gateway) -> None:
    gateway.engines.replay = endless
    with gateway.openai().chat.completions.create(**chat(stream=True)) as stream:
        chunks = iter(stream)
        said = [next(chunks).choices[0].delta.content for _ in range(5)]
    assert said == ["", "more ", "more ", "more ", "more "]


def test_a_client_that_disconnects_closes_its_stream_and_frees_its_slot(
    own_gateway: Gateway,
) -> None:
    own_gateway.add_tenant("small", max_concurrent=1)
    own_gateway.engines.replay = endless
    body = chat("tiny", stream=True)
    for _ in range(3):
        with own_gateway.openai("small").chat.completions.create(**body) as stream:
            next(iter(stream))
            request_id = own_gateway.engines.last.request_id
            assert own_gateway.post(CHAT, body, tenant="small").status_code == 429
        assert eventually(lambda gone=request_id: gone in own_gateway.engines.closed)  # type: ignore[misc]
    assert sorted(own_gateway.engines.closed) == sorted(
        {c.request_id for _, c in own_gateway.engines.calls}
    )


@pytest.mark.parametrize("after_header", [False, True])
def test_a_client_that_disconnects_before_the_first_byte_closes_the_call(
    gateway: Gateway, after_header: bool
) -> None:
    async def stuck(call: Call) -> Items:
        if after_header:
            yield header(call)
        await asyncio.sleep(60)
        yield header(call)

    gateway.engines.replay = stuck
    with leaving(gateway, "POST", CHAT, gateway.keys["acme"], json.dumps(chat()).encode()):
        assert eventually(lambda: bool(gateway.engines.calls), within_s=20)
    assert eventually(lambda: gateway.engines.closed == [gateway.engines.last.request_id])


def test_a_client_that_disconnects_while_sending_is_no_failure(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    address = httpx.URL(gateway.url)
    for key, path in ((gateway.keys["acme"], CHAT), (gateway.admin_key, UPLOAD)):
        verb = "POST" if path == CHAT else "PUT"
        head = f"{verb} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        with socket.create_connection((address.host, address.port or 0)) as connection:
            connection.sendall(f"{head}content-length: 1000\r\n\r\nonly this".encode())
            time.sleep(0.1)
    assert gateway.request("GET", "/healthz", None).status_code == 200
    assert [record.msg for record in caplog.records if record.name.startswith("lorikeet")] == []


def test_a_tenant_over_its_limit_gets_retry_after(own_gateway: Gateway) -> None:
    own_gateway.add_tenant("small", max_concurrent=2)
    own_gateway.engines.replay = endless
    client = own_gateway.openai("small")
    body = chat("tiny", stream=True)
    with (
        client.chat.completions.create(**body) as first,
        client.chat.completions.create(**body) as second,
    ):
        next(iter(first))
        next(iter(second))
        refused = own_gateway.post(CHAT, body, tenant="small")
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        own_gateway.engines.replay = repeat
        assert own_gateway.post(CHAT, body, tenant="acme").status_code == 200
    assert eventually(lambda: own_gateway.post(CHAT, body, tenant="small").status_code == 200)


def test_a_full_gateway_refuses_every_tenant_until_a_slot_is_free(tmp_path: Path) -> None:
    body = chat("tiny", stream=True)
    with serving(tmp_path, max_open_requests=1) as gateway:
        gateway.engines.replay = endless
        with gateway.openai("acme").chat.completions.create(**body) as stream:
            next(iter(stream))
            refused = gateway.post(CHAT, body, tenant="globex")
            assert error_of(refused, 503)["code"] == "overloaded"  # not caused by globex itself
            assert int(refused.headers["retry-after"]) >= 1
        gateway.engines.replay = repeat
        assert eventually(lambda: gateway.post(CHAT, body, tenant="globex").status_code == 200)


def test_failed_requests_free_their_slot(own_gateway: Gateway) -> None:
    own_gateway.add_tenant("small", max_concurrent=1)

    async def broken(call: Call) -> Items:
        raise ZeroDivisionError
        yield header(call)

    own_gateway.engines.replay = broken
    for _ in range(3):
        assert own_gateway.post(CHAT, chat("tiny"), tenant="small").status_code == 500
        assert own_gateway.post(CHAT, chat("tiny", top_p=7), tenant="small").status_code == 400


def test_neither_prompts_nor_keys_are_logged(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "tangerine-dream"

    async def broken(call: Call) -> Items:
        yield header(call)
        yield EventStream(call).delta(0, "x")
        raise ValueError(str(call))

    answers = [
        gateway.post(CHAT, chat(content=secret)),
        gateway.post(CHAT, chat(content=secret, temperature=9)),
        gateway.post(CHAT, chat(content=[secret])),  # type: ignore[arg-type]
        gateway.post(CHAT, chat(stop=[secret, 1])),
        gateway.post(CHAT, json.dumps(chat(content=secret)).encode()[:-1]),
        gateway.post("/v1/completions", {"model": "tiny", "prompt": [secret, 1]}),
        gateway.request("POST", CHAT, "lk_" + secret, json=chat()),
    ]
    gateway.engines.replay = broken
    answers.append(gateway.post(CHAT, chat(content=secret, stream=True)))
    answers.append(gateway.post(CHAT, chat(content=secret)))
    assert [answer.status_code for answer in answers] == [
        200,
        400,
        400,
        400,
        400,
        400,
        401,
        200,
        500,
    ]
    for answer in answers[1:]:
        assert secret not in answer.text
    logged = [str(r.__dict__) + r.getMessage() for r in caplog.records if "httpcore" not in r.name]
    assert any("request_failed" in line for line in logged)
    for line in logged:
        assert secret not in line
        assert not any(key in line for key in (*gateway.keys.values(), gateway.admin_key))


def test_a_gateway_is_alive_before_it_is_ready(gateway: Gateway) -> None:
    for serves, ready in ((True, 200), (False, 503), (True, 200)):
        gateway.engines.serves = serves
        assert gateway.request("GET", "/healthz", None).status_code == 200
        for path in ("/readyz", "/health"):
            answer = gateway.request("GET", path, None)
            assert answer.status_code == ready
            assert ("retry-after" in answer.headers) == (not serves)
