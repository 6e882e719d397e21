"""HTTP listeners of a gateway: one for tenants, one for operators.

Tenants connect to Serve's HTTP port; behind it, PublicListener wraps the gateway's application
(gateway/app.py) and passes on only tenants' paths. Operators and Prometheus connect to
AdminListener, which serves the whole application in the gateway's own process. A public proxy
therefore needs no rules to hide the admin API.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from lorikeet.addresses import Address
from lorikeet.errors import InvalidSetting, Overloaded
from lorikeet.gateway.app import RequestMiddleware
from lorikeet.gateway.error_responses import add_error_handlers, error_response
from lorikeet.gateway.routes.health import LIVENESS, READINESS
from lorikeet.retry_after import FULL_GATEWAY_S

log = logging.getLogger(__name__)

_PROBES = (LIVENESS, *READINESS)
_LAST_REQUESTS_S = 20
"""Seconds that requests in progress have to finish when the gateway ends."""


class PublicListener:
    """ASGI wrapper that serves only tenants' paths (`/v1/*`) and probes; other paths are not found.

    max_requests: concurrent requests beyond which all but probes are refused; None: no limit. Must
        be below Serve's limit for this gateway: at Serve's limit health checks wait too, and load
        balancers would take the gateway out of service.
    """

    def __init__(self, app: ASGIApp, max_requests: int | None = None) -> None:
        self._app = app
        self._max_requests, self._requests = max_requests, 0
        self._full = RequestMiddleware(_refuse_full)
        self._nothing = FastAPI(openapi_url=None, redirect_slashes=False)
        self._nothing.add_middleware(RequestMiddleware)
        add_error_handlers(self._nothing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request for a public path; answer any other with 404."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        self._requests += 1
        try:
            await self._app_for(_path(scope))(scope, receive, send)
        finally:
            self._requests -= 1

    def _app_for(self, path: str) -> ASGIApp:
        if path in _PROBES:
            return self._app
        if self._max_requests is not None and self._requests > self._max_requests:
            return self._full
        return self._app if path.startswith("/v1/") else self._nothing


class AdminListener:
    """Listener for operators, at an address that the gateways of one host share (SO_REUSEPORT).

    The kernel gives each connection to one of the listening gateways, so in a rolling update a new
    gateway starts before the old one has ended. The constructor binds the address, so that a start
    fails early; connections are accepted only once the application has started.

    Raises InvalidSetting if the address cannot be bound.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._socket = _bind(address)

    def open_with(self, app: FastAPI) -> None:
        """Serve `app` from the end of its startup until its shutdown, as part of its lifespan."""
        running = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
            async with running(app), self._open(app):
                yield

        app.router.lifespan_context = lifespan

    @asynccontextmanager
    async def _open(self, app: FastAPI) -> AsyncGenerator[None, None]:
        server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",  # Serve runs the application's lifespan
                access_log=False,
                log_config=None,
                log_level=logging.CRITICAL,  # exceptions in logs may quote a prompt
                timeout_graceful_shutdown=_LAST_REQUESTS_S,
            )
        )
        self._socket.listen(server.config.backlog)
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        log.info("admin_listener_open", extra={"address": str(self._address)})
        try:
            yield
        finally:
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """Uvicorn server that installs no signal handlers: the process belongs to Ray."""

    capture_signals = nullcontext  # type: ignore[assignment]


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _refuse_full(scope: Scope, receive: Receive, send: Send) -> None:
    full = Overloaded(
        "this gateway is full: send it again in a moment", retry_after_s=FULL_GATEWAY_S
    )
    await error_response(full, scope)(scope, receive, send)


def _bind(address: Address) -> socket.socket:
    """Return a socket bound to the address, not listening yet. Raises InvalidSetting."""
    bound: socket.socket | None = None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(where)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise InvalidSetting(
            f"LORIKEET_ADMIN_ADDRESS={address}: {error.strerror}: stop the process that listens"
            " there, or choose another address of this machine"
        ) from error
    return bound
