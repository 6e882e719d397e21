"""Middleware in front of Ray Serve: turns, unread answers, reading ahead, ids, what Serve answers.

Serve imports it when
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=lorikeet.serving.proxy_middleware:middlewares.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.error_shapes import openai_error_body
from lorikeet.errors import Unavailable
from lorikeet.gateway.error_responses import error_response

log = logging.getLogger(__name__)

T = TypeVar("T")

STALLED_S = 60.0
_LEAST_BYTES_PER_S = 2**16
"""A large message has a second more for each multiple of these bytes."""
START_INTERVAL_S = 0.002
"""The least time between the beginnings of two requests with one key."""
MAX_WAITING = 1000
"""How many requests with one key may wait for their turn; more are refused."""
_HEADER = b"x-request-id"
_WATCH_DISABLED = (b"x-request-disconnect-disabled", b"?1")
_ROUTES = "/-/routes"


def middlewares() -> list[Middleware]:
    """The middleware that Serve puts around its own; a gateway's answers pass it as they are."""
    return [
        Middleware(KeyPacingMiddleware),
        Middleware(UnreadAnswerMiddleware),
        Middleware(RequestIdMiddleware),
        Middleware(UnavailableMiddleware),
        Middleware(HiddenRoutesMiddleware),
        Middleware(NoReadAheadMiddleware, in_gateway=_is_gateway()),
    ]


class KeyPacingMiddleware:
    """Lets requests with one key begin one after the other, with a pause between them.

    A thousand that come at once would all be begun before anybody else's is looked at again, and
    fill what Serve lets wait for a gateway. So they take turns with everybody else's, and no more
    than one of them begins in a round of the event loop. Serve's proxy takes as long for a request
    as the pause. Whether there is such a key is not known here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._queues = WeakValueDictionary[str, _KeyQueue]()  # by key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on in its turn; one without a key, such as a probe, at once."""
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
    """The queue of one key's requests. waiting: how many wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0


def _key_of(scope: Scope) -> str:
    """The key as gateway/auth.py reads it, however it is sent; empty without one."""
    first = dict(reversed(scope["headers"]))
    key: bytes = first.get(b"authorization", b"").partition(b" ")[2] or first.get(b"x-api-key", b"")
    return key.decode("latin-1").strip()


class UnreadAnswerMiddleware:
    """Sends an answer as its client reads it; cuts it where nothing is read for too long.

    The application waits while its client does not read, and what it makes meanwhile is joined in
    its buffer of that answer. Of an answer that is cut the application is told that the client has
    gone, and the connection is closed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with _Answer(receive, send) as answer:
            await self._app(scope, answer.receive, answer.send)


class _Answer:
    """Sends the messages of one answer, until it is cut; a `with` block holds while it watches.

    One timer watches over all messages: one for each would cost a tenth of a delta's time. Nor is
    there a task for them: who sends or receives is woken as asyncio.timeout does it.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._loop = asyncio.get_running_loop()
        self._due_s = math.inf  # when what is being sent must have been
        self._waiting = set[asyncio.Task[Any]]()
        self._cut = False

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._watch()
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._watching.cancel()

    async def receive(self) -> Message:
        """Return the client's next message; that it has gone, once the answer is cut."""
        message = None if self._cut else await self._unless_cut(self._receive())
        return message or {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a message to the client; nothing, once the answer is cut."""
        if self._cut:
            return
        size = len(message.get("body", b""))
        self._due_s = self._loop.time() + STALLED_S + size / _LEAST_BYTES_PER_S
        try:
            await self._unless_cut(self._send(message))
        finally:
            self._due_s = math.inf

    async def _unless_cut(self, work: Awaitable[T]) -> T | None:
        """Return what is awaited; None once the answer is cut."""
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
        """Cut the answer if a message has not been sent in time; else look again."""
        now_s = self._loop.time()
        if now_s < self._due_s:
            self._watching = self._loop.call_at(min(self._due_s, now_s + STALLED_S), self._watch)
            return
        log.warning("answer_unread")
        self._cut = True
        for task in self._waiting:
            task.cancel()


class RequestIdMiddleware:
    """Keeps the gateway's request id and no other.

    Serve takes a client's x-request-id for its own logs and adds one of its own to every answer
    behind the gateway's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on without its id, and the answer with its first."""
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
    """Puts Serve's own 503 into the API's words.

    Serve answers 503 in plain text where too many requests wait for a gateway, and where there is
    no gateway.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and the answer unless it is Serve's own 503."""
        refused = False

        async def send_or_refuse(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 503:
                headers = MutableHeaders(raw=list(message["headers"]))
                if headers.get("content-type") != "application/json":
                    refused = True
                    await _refuse(headers, scope, receive, send)
            if not refused:
                await send(message)

        await self._app(scope, receive, send_or_refuse)


class HiddenRoutesMiddleware:
    """Hides Serve's list of applications, which it shows to anybody.

    Serve's /-/healthz stays: KubeRay's probes and HAProxy's health checks ask for it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on unless it asks for the list."""
        app = self._app
        if scope["type"] == "http" and scope["path"].removeprefix(scope["root_path"]) == _ROUTES:
            app = JSONResponse(openai_error_body("not_found", f"there is no {_ROUTES} here"), 404)
        await app(scope, receive, send)


class NoReadAheadMiddleware:
    """Keeps Serve from reading ahead, to see whether a client leaves, where the gateway looks.

    Serve reads into a queue without a bound: with the body of a PUT, a pushed adapter, a gateway
    whose disk is slower than the network would hold whole blobs in memory. Told not to look, it
    leaves them in their connections, and PushEndpoints looks itself. (Serve's own proxy reads ahead
    all the same.) In a gateway's own server, behind HAProxy, Serve has two tasks for each request
    to that end, of which none needs them: ReplicaResponse looks, and other routes are short. Its
    proxy must look, for what waits there for a gateway.
    """

    def __init__(self, app: ASGIApp, *, in_gateway: bool = False) -> None:
        self._app = app
        self._in_gateway = in_gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with the word that Serve is not to look where that is so."""
        if scope["type"] == "http" and (self._in_gateway or scope["method"] == "PUT"):
            others = [each for each in scope["headers"] if each[0] != _WATCH_DISABLED[0]]
            scope = {**scope, "headers": [*others, _WATCH_DISABLED]}
        await self._app(scope, receive, send)


def _is_gateway() -> bool:
    """Return whether this process is a gateway's, and not that of Serve's proxy."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


async def _refuse(theirs: MutableHeaders, scope: Scope, receive: Receive, send: Send) -> None:
    asked = {**scope, "state": {"request_id": theirs.get("x-request-id")}}
    answer = error_response(Unavailable("no gateway can take this request: send it again"), asked)
    for name in ("retry-after", "x-request-id"):
        if name in theirs:
            answer.headers[name] = theirs[name]
    await answer(scope, receive, send)
