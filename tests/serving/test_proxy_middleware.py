"""Middleware of Serve's proxy: Serve's own answers, request ids, pacing by key."""

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import Mapping

import httpx
import pytest
from ray import serve
from ray.serve._private.http_util import (
    convert_object_to_asgi_messages,
    parse_disconnect_disabled_header,
    parse_session_id_header,
)
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.serving import proxy_middleware
from lorikeet.serving.proxy_middleware import (
    START_INTERVAL_S,
    KeyPacingMiddleware,
    UnavailableMiddleware,
    middlewares,
)


def answer(
    app: ASGIApp,
    path: str = "/v1/models",
    method: str = "GET",
    headers: Mapping[str, str | bytes] = {"x-request-id": "mine"},
) -> httpx.Response:
    """Return the answer of an application behind the middleware."""
    for middleware in middlewares():  # the last is outermost, as Serve applies them
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            encoded = [(name.encode(), value) for name, value in headers.items()]
            return await client.request(method, path, headers=encoded)  # type: ignore[arg-type]

    return asyncio.run(ask())


def test_a_websocket_is_refused_by_426_before_serve_sees_it() -> None:
    """Codex sends its requests over HTTP at once on 426, and after seven attempts otherwise."""

    async def serve_fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("Serve was asked")

    app: ASGIApp = serve_fails
    for middleware in middlewares():  # the last is outermost, as Serve applies them
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    with pytest.raises(WebSocketDenialResponse) as refused:
        TestClient(app).websocket_connect("/v1/responses").__enter__()
    assert refused.value.status_code == 426
    assert refused.value.json()["error"]["code"] == "upgrade_required"
    assert "HTTP" in refused.value.json()["error"]["message"]


def serve_says(status: int, text: str, *headers: tuple[bytes, bytes]) -> ASGIApp:
    async def say(scope: Scope, receive: Receive, send: Send) -> None:
        for message in convert_object_to_asgi_messages(text, status, list(headers)):
            await send(message)

    return say


@pytest.mark.parametrize(("headers", "retry_after"), [([(b"retry-after", b"5")], "5"), ([], "1")])
def test_serves_own_503_becomes_an_openai_error(
    headers: list[tuple[bytes, bytes]], retry_after: str
) -> None:
    refused = answer(serve_says(503, "Request dropped …", *headers, (b"x-request-id", b"theirs")))
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == retry_after
    assert refused.headers["x-request-id"] == "theirs"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "unavailable")
    assert "send it again" in error["message"]
    assert int(refused.headers["content-length"]) == len(refused.content)


def test_serves_own_503_becomes_an_anthropic_error_for_anthropic_clients() -> None:
    refused = answer(serve_says(503, "…", (b"x-request-id", b"theirs")), "/v1/messages")
    assert (refused.status_code, refused.json()["request_id"]) == (503, "theirs")
    assert refused.json()["error"]["details"] == {"error_code": "unavailable"}


def test_serves_own_500_for_a_gateway_that_ended_becomes_a_503_to_send_again() -> None:
    refused = answer(serve_says(500, "Internal Server Error", (b"x-request-id", b"theirs")))
    assert (refused.status_code, refused.headers["x-request-id"]) == (503, "theirs")
    assert refused.json()["error"]["code"] == "unavailable"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_request_that_the_end_of_the_server_cuts_gets_its_apis_error(path: str) -> None:
    async def hang(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(60)

    sent = asyncio.run(cut(UnavailableMiddleware(hang), path))
    assert [each["type"] for each in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 503
    assert ("details" in json.loads(sent[1]["body"])["error"]) == (path == "/v1/messages")


def test_a_stream_that_the_end_of_the_server_cuts_gets_no_second_response() -> None:
    async def begin(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    sent = asyncio.run(cut(UnavailableMiddleware(begin), "/v1/responses"))
    assert [each["type"] for each in sent] == ["http.response.start"]


async def cut(app: ASGIApp, path: str) -> list[Message]:
    """Cancel a request that runs, as uvicorn does at its end; return the messages sent."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    scope = {"type": "http", "path": path, "headers": [], "method": "POST"}
    running = asyncio.ensure_future(app(scope, receive, send))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return sent


@pytest.mark.parametrize(
    "ours",
    [
        JSONResponse({"error": {"code": "overloaded"}}, 503, {"retry-after": "7"}),
        Response("fine", media_type="text/plain"),
        Response("Not found", 404, media_type="text/plain"),
        StreamingResponse(iter([b"data: 1\n\n", b"data: 2\n\n"]), media_type="text/event-stream"),
    ],
    ids=["our refusal", "plain", "not found", "stream"],
)
def test_other_answers_pass_unchanged(ours: Response) -> None:
    passed = answer(ours)
    assert passed.status_code == ours.status_code
    assert passed.headers.get("retry-after") == ours.headers.get("retry-after")
    streamed = isinstance(ours, StreamingResponse)
    assert passed.content == (b"data: 1\n\ndata: 2\n\n" if streamed else ours.body)


def test_an_answer_has_only_the_gateways_request_id() -> None:
    ids = [(b"x-request-id", b"ours"), (b"x-request-id", b"serves")]
    passed = answer(serve_says(200, "fine", *ids))
    assert passed.headers.get_list("x-request-id") == ["ours"]


def test_serves_list_of_applications_is_hidden_and_its_health_check_is_not() -> None:
    serves = JSONResponse({"/": "default"})
    hidden = answer(serves, "/-/routes")
    assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "not_found")
    assert answer(serves, "/-/healthz").status_code == 200


@pytest.mark.parametrize(
    ("in_gateway", "method", "waits"),
    [
        (False, "PUT", True),
        (False, "POST", False),
        (False, "GET", False),
        (True, "PUT", True),
        (True, "POST", True),
    ],
)
def test_serve_reads_no_put_body_ahead_and_in_a_gateway_no_body(
    in_gateway: bool, method: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_gateway:
        monkeypatch.setattr(serve, "get_replica_context", lambda: "a gateway's")
    seen = list[Headers]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["headers"])
        await Response()(scope, receive, send)

    theirs = {"x-request-disconnect-disabled": "?0"}
    assert answer(app, method=method, headers=theirs if waits else {}).status_code == 200
    assert parse_disconnect_disabled_header(dict(seen[0])) is waits


@pytest.mark.parametrize(
    "name", ["x-session-id", "X_Session_Id", "serve_multiplexed_model_id", "traceparent"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_header_that_serve_cannot_decode_is_a_bad_request(name: str, path: str) -> None:
    refused = answer(serve_decodes, path, headers={name: b"caf\xe9"})
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert f"{name.lower()}: want text in UTF-8" in error["message"]
    assert refused.headers["x-request-id"]


@pytest.mark.parametrize(
    "headers",
    [{"x-session-id": "café".encode()}, {"user-agent": b"caf\xe9"}, {"x-session-id": b"a"}],
    ids=["UTF-8", "a header that Serve does not read", "ASCII"],
)
def test_other_headers_pass_in_any_encoding(headers: Mapping[str, bytes]) -> None:
    assert answer(serve_decodes, headers=headers).status_code == 200


async def serve_decodes(scope: Scope, receive: Receive, send: Send) -> None:
    """Read a session's header as Serve does."""
    parse_session_id_header(dict(scope["headers"]))
    await Response()(scope, receive, send)


Headers = list[tuple[bytes, bytes]]


def begun_in_order(*sent: Headers) -> list[Headers]:
    """Send requests at once, in this order; return their headers in the order of their start."""
    begun = list[Headers]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["headers"])
        await asyncio.sleep(10.0)

    async def ask() -> None:
        door = KeyPacingMiddleware(app)
        scopes = [{"type": "http", "path": "/v1/models", "headers": each} for each in sent]
        asked = [asyncio.create_task(door(each, _nothing, _nothing)) for each in scopes]
        while len(begun) + sum(each.done() for each in asked) < len(sent):
            await asyncio.sleep(0.01)
        for each in asked:
            each.cancel()

    asyncio.run(ask())
    return begun


def bearer(key: str) -> Headers:
    return [(b"authorization", f"Bearer {key}".encode())]


async def _nothing(*_: object) -> None:
    """Receive and send nothing."""


@pytest.mark.parametrize("other", [bearer("another"), []], ids=["another key", "none"])
def test_requests_with_other_keys_start_between_many_requests_with_one_key(other: Headers) -> None:
    begun = begun_in_order(*[bearer("many")] * 500, other)
    assert begun.index(other) == 1
    assert len(begun) == 501


def test_requests_with_different_keys_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy_middleware, "START_INTERVAL_S", 0.1)
    began_s = time.monotonic()
    begun_in_order(*[bearer(f"key {i}") for i in range(100)])
    assert time.monotonic() - began_s < 5.0  # in sequence they take ten


@pytest.mark.parametrize(
    "as_well",
    [
        [(b"authorization", b"Bearer   one ")],
        [(b"x-api-key", b"one")],
        [(b"authorization", b"Basic " + b64encode(b"any:one"))],
        [(b"authorization", b"Bearer one"), (b"x-api-key", b"two")],
        [(b"authorization", b"Bearer one"), (b"authorization", b"Bearer two")],
    ],
    ids=["spaces", "x-api-key", "basic", "both", "twice"],
)
def test_requests_with_a_key_start_an_interval_apart_in_either_header(as_well: Headers) -> None:
    began_s = time.monotonic()
    begun_in_order(*[bearer("one"), as_well] * 25)
    assert time.monotonic() - began_s >= 49 * START_INTERVAL_S


def test_requests_beyond_the_longest_queue_of_a_key_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy_middleware, "MAX_WAITING", 3)
    assert len(begun_in_order(*[bearer("one")] * 10)) == 4  # and six are answered
