"""What runs inside Ray Serve's HTTP proxies.

Serve imports it when RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=lorikeet.serving.proxy:middlewares.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = b"x-request-id"


def middlewares() -> list[Middleware]:
    """Serve puts these around its own."""
    return [Middleware(OneRequestId)]


class OneRequestId:
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
