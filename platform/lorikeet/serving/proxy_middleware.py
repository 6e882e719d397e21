"""Middleware in Ray Serve's HTTP proxies: unread answers, request ids, what Serve itself answers.

Serve imports it when
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=lorikeet.serving.proxy_middleware:middlewares.
"""

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.dialects import error_body
from lorikeet.errors import Unavailable
from lorikeet.gateway.error_responses import error_response
from lorikeet.serving.unread_answers import UnreadAnswerMiddleware

_HEADER = b"x-request-id"
_ROUTES = "/-/routes"


def middlewares() -> list[Middleware]:
    """The middleware that Serve puts around its own."""
    return [
        Middleware(UnreadAnswerMiddleware),
        Middleware(RequestIdMiddleware),
        Middleware(UnavailableMiddleware),
        Middleware(RoutesMiddleware),
    ]


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


class RoutesMiddleware:
    """Hides Serve's list of applications, which it shows to anybody.

    Serve's /-/healthz stays: KubeRay's probes and HAProxy's health checks ask for it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on unless it asks for the list."""
        app = self._app
        if scope["type"] == "http" and scope["path"].removeprefix(scope["root_path"]) == _ROUTES:
            app = JSONResponse(error_body("not_found", f"there is no {_ROUTES} here"), 404)
        await app(scope, receive, send)


async def _refuse(theirs: MutableHeaders, scope: Scope, receive: Receive, send: Send) -> None:
    asked = {**scope, "state": {"request_id": theirs.get("x-request-id")}}
    answer = error_response(Unavailable("no gateway can take this request: send it again"), asked)
    for name in ("retry-after", "x-request-id"):
        if name in theirs:
            answer.headers[name] = theirs[name]
    await answer(scope, receive, send)
