"""Middleware for every request: an id, and a 500 when the code breaks."""

import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.dialects import Dialect
from lorikeet.gateway.error_responses import dialect_of, internal_error_response
from lorikeet.logs import log_unexpected

REQUEST_ID_HEADER = "x-request-id"


class RequestMiddleware:
    """Makes the request's id, and turns an unexpected exception into a plain 500.

    Clients cannot choose the id: theirs could collide with another's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope.setdefault("state", {})["request_id"] = uuid.uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                if dialect_of(scope) is Dialect.ANTHROPIC:
                    headers["request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # while sending its body: nobody reads a response
        except Exception as error:
            log_unexpected("request_failed", request_id, error)
            if started:
                raise
            await internal_error_response(scope)(scope, receive, send_with_id)


def request_id_of(request: Request) -> str:
    """Return the request's id, 32 hex digits."""
    return str(request.state.request_id)
