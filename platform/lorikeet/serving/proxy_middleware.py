"""ASGI middleware around Ray Serve's HTTP proxy, and around a gateway's own server behind HAProxy.

Serve imports `middlewares` from here because of the environment variable
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=lorikeet.serving.proxy_middleware:middlewares.
"""

import asyncio
import logging
import math
import os
import uuid
from collections.abc import Awaitable
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from lorikeet.apis.errors import openai_error_body
from lorikeet.errors import InvalidInput, Unavailable
from lorikeet.gateway.basic_auth import as_bearer
from lorikeet.gateway.error_responses import error_response, websocket_refusal
from lorikeet.gateway.http_protocol import BoundedHttpProtocol
from lorikeet.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")

STALLED_S = 60.0
"""Seconds that a client has to read a message; each _LEAST_BYTES_PER_S bytes of the message add one
second.
"""
_LEAST_BYTES_PER_S = 2**16
START_INTERVAL_S = 0.002
"""Minimum time in seconds between the starts of two requests with the same API key."""
MAX_WAITING = 1000
"""Maximum number of requests with one API key that wait to start; more are refused."""
_MAX_CONNECTIONS = "LORIKEET_MAX_CONNECTIONS"
_HEADER = b"x-request-id"
_WATCH_DISABLED = (b"x-request-disconnect-disabled", b"?1")
_ROUTES = "/-/routes"
_DECODED = frozenset(
    (
        b"x-session-id",
        b"serve-multiplexed-model-id",
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"traceparent",
        b"tracestate",
    )
)
"""Headers that Serve decodes, apart from those that RequestIdMiddleware drops.

Serve treats `_` in a header's name like `-`.
"""


def middlewares() -> list[Middleware]:
    """Return the middleware for Serve, innermost first. Gateways' answers pass unchanged.

    Serve calls this before it starts uvicorn, whose default protocol becomes BoundedHttpProtocol.
    """
    protocol = BoundedHttpProtocol
    given = (
        {_MAX_CONNECTIONS: os.environ[_MAX_CONNECTIONS]} if _MAX_CONNECTIONS in os.environ else {}
    )
    protocol.limit_connections(Settings.from_env(given).max_connections)
    HTTP_PROTOCOLS["auto"] = f"{protocol.__module__}:{protocol.__qualname__}"
    return [
        Middleware(NoWebSocketMiddleware),
        Middleware(KeyPacingMiddleware),
        Middleware(UnreadAnswerMiddleware),
        Middleware(RequestIdMiddleware),
        Middleware(UnavailableMiddleware),
        Middleware(HiddenRoutesMiddleware),
        Middleware(NoReadAheadMiddleware, in_gateway=_is_gateway()),
        Middleware(HeaderEncodingMiddleware),
    ]


class NoWebSocketMiddleware:
    """Middleware that refuses WebSocket connections, before Serve forwards them to a gateway."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, unless it asks for a WebSocket."""
        asks = scope["type"] == "websocket"
        await (websocket_refusal(scope) if asks else self._app)(scope, receive, send)


class KeyPacingMiddleware:
    """Middleware that starts requests with the same API key START_INTERVAL_S seconds apart.

    Without pacing, a thousand simultaneous requests of one client would all start before other
    clients' requests, and fill Serve's queue for a gateway. Unknown keys are paced as well.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._queues = WeakValueDictionary[str, _KeyQueue]()  # by key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on when its key's queue allows; pass a request without a key on
        at once.
        """
        if scope["type"] == "http" and (key := _key_of(scope)):
            queue = self._queues.setdefault(key, _KeyQueue())
            if queue.waiting >= MAX_WAITING:
                await _refuse(MutableHeaders(), scope, receive, send)
                return
            queue.waiting += 1
            try:
                await queue.acquire()
            finally:
                queue.waiting -= 1
            asyncio.get_running_loop().call_later(START_INTERVAL_S, queue.release)
        await self._app(scope, receive, send)


class _KeyQueue(asyncio.Lock):
    """Lock that a request takes in order to start; one for each API key.

    waiting: number of requests that wait for the lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0


def _key_of(scope: Scope) -> str:
    """Return a request's API key, from the header Authorization (Bearer) or else x-api-key; empty
    if there is none.
    """
    first = dict(reversed(scope["headers"]))
    authorization = as_bearer(first.get(b"authorization", b"").decode("latin-1"))
    key = authorization.partition(" ")[2] or first.get(b"x-api-key", b"").decode("latin-1")
    return key.strip()


class UnreadAnswerMiddleware:
    """Middleware that ends an answer whose client has stopped reading.

    `send` waits while the client does not read; the application collects further output in its own
    buffer meanwhile. When a message has not been read in time (STALLED_S), the connection is closed
    and the application receives http.disconnect.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with `receive` and `send` that watch for an unread answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with _Answer(receive, send) as answer:
            await self._app(scope, answer.receive, answer.send)


class _Answer:
    """Answer to one request, cut when a message is not read in time. A context manager.

    One timer serves all messages; it wakes callers that wait in `send` or `receive` by
    cancellation, as asyncio.timeout does.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._loop = asyncio.get_running_loop()
        self._due_s = math.inf  # deadline of the message that is being sent
        self._waiting = set[asyncio.Task[Any]]()
        self._cut = False

    def __enter__(self) -> Self:
        """Start the timer."""
        self._watch()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the timer."""
        self._watching.cancel()

    async def receive(self) -> Message:
        """Return the client's next message; http.disconnect once the answer is cut."""
        message = None if self._cut else await self._unless_cut(self._receive())
        return message or {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a message to the client; do nothing once the answer is cut."""
        if self._cut:
            return
        size = len(message.get("body", b""))
        self._due_s = self._loop.time() + STALLED_S + size / _LEAST_BYTES_PER_S
        try:
            await self._unless_cut(self._send(message))
        finally:
            self._due_s = math.inf

    async def _unless_cut(self, work: Awaitable[T]) -> T | None:
        """Await `work` and return its result; return None as soon as the answer is cut."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if not self._cut or task.uncancel():
                raise
            return None
        finally:
            self._waiting.discard(task)

    def _watch(self) -> None:
        """Cut the answer if the current message is overdue; else set the timer again."""
        now_s = self._loop.time()
        if now_s < self._due_s:
            self._watching = self._loop.call_at(min(self._due_s, now_s + STALLED_S), self._watch)
            return
        log.warning("answer_unread")
        self._cut = True
        for task in self._waiting:
            task.cancel()


class RequestIdMiddleware:
    """Middleware that keeps the gateway's x-request-id and drops all others.

    Serve would use a client's x-request-id in its own logs, and adds a second x-request-id to every
    answer, after the gateway's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on without its x-request-id, and the answer with only its first one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = [(name, value) for name, value in scope["headers"] if name.lower() != _HEADER]

        async def send_with_one_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                ids = [i for i, (name, _) in enumerate(headers) if name.lower() == _HEADER]
                message["headers"] = [h for i, h in enumerate(headers) if i not in ids[1:]]
            await send(message)

        await self._app({**scope, "headers": sent}, receive, send_with_one_id)


class UnavailableMiddleware:
    """Middleware that turns Serve's own failures into the API's JSON errors.

    Serve answers in plain text when too many requests wait for a gateway, when there is no gateway
    (503), and when the gateway of a request ends (500). A server that ends cancels its requests,
    and answers those without a response by 500 in plain text.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; replace the answer if it is Serve's own failure."""
        started = refused = False

        async def send_or_refuse(message: Message) -> None:
            nonlocal started, refused
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(raw=list(message["headers"]))
                if message["status"] >= 500 and headers.get("content-type") != "application/json":
                    refused = True
                    await _refuse(headers, scope, receive, send)
            if not refused:
                await send(message)

        try:
            await self._app(scope, receive, send_or_refuse)
        except BaseException:  # CancelledError, mostly
            if scope["type"] == "http" and not started:
                await _refuse(MutableHeaders(), scope, receive, send)
            raise


class HiddenRoutesMiddleware:
    """Middleware that hides /-/routes, Serve's public list of its applications."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; answer 404 if it is for /-/routes."""
        app = self._app
        if scope["type"] == "http" and scope["path"].removeprefix(scope["root_path"]) == _ROUTES:
            app = JSONResponse(openai_error_body("not_found", f"there is no {_ROUTES} here"), 404)
        await app(scope, receive, send)


class HeaderEncodingMiddleware:
    """Middleware that answers 400 if a header that Serve would decode is not UTF-8.

    On such a header, Serve itself would answer 500 in plain text before the gateway sees the
    request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; answer 400 if a header that Serve decodes is no UTF-8."""
        app = self._app
        if scope["type"] == "http" and (name := _undecodable(scope)) is not None:
            request_id = uuid.uuid4().hex
            error = InvalidInput(f"{name}: want text in UTF-8, best in ASCII", param=name)
            refusal = error_response(error, {**scope, "state": {"request_id": request_id}})
            refusal.headers["x-request-id"] = request_id
            app = refusal
        await app(scope, receive, send)


def _undecodable(scope: Scope) -> str | None:
    """Return the name of the first header that Serve cannot decode; None if there is none."""
    for name, value in scope["headers"]:
        if not value.isascii() and name.replace(b"_", b"-") in _DECODED:
            try:
                value.decode()
            except UnicodeDecodeError:
                return str(name, "latin-1")
    return None


class NoReadAheadMiddleware:
    """Middleware that keeps Serve from reading request bodies ahead to detect a disconnect.

    Sets the header x-request-disconnect-disabled, which Serve obeys, in two cases:

    - PUT requests, which push adapters. Serve reads bodies into an unbounded queue, so a gateway
      whose disk is slower than the network would hold whole blobs in memory; PushEndpoints detects
      a disconnect itself.
    - All requests in a gateway's own server, behind HAProxy. ReplicaResponse detects disconnects,
      and the other routes are short.

    Serve's proxy must detect disconnects, because of requests that wait there for a gateway.

    in_gateway: whether this process is a gateway rather than Serve's proxy.
    """

    def __init__(self, app: ASGIApp, *, in_gateway: bool = False) -> None:
        self._app = app
        self._in_gateway = in_gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with x-request-disconnect-disabled where the class says so."""
        if scope["type"] == "http" and (self._in_gateway or scope["method"] == "PUT"):
            others = [each for each in scope["headers"] if each[0] != _WATCH_DISABLED[0]]
            scope = {**scope, "headers": [*others, _WATCH_DISABLED]}
        await self._app(scope, receive, send)


def _is_gateway() -> bool:
    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


async def _refuse(
    serve_headers: MutableHeaders, scope: Scope, receive: Receive, send: Send
) -> None:
    asked = {**scope, "state": {"request_id": serve_headers.get("x-request-id")}}
    answer = error_response(Unavailable("no gateway can take this request: send it again"), asked)
    for name in ("retry-after", "x-request-id"):
        if name in serve_headers:
            answer.headers[name] = serve_headers[name]
    await answer(scope, receive, send)
