"""The two HTTP listeners of a gateway: one for tenants, one for operators.

Tenants' requests arrive through Serve's HTTP port, behind which the gateway wraps its application
(gateway/app.py) in PublicListener. Requests of operators and Prometheus arrive at AdminListener, a
socket of the gateway's own process that serves the whole application and that no public proxy
forwards to.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, nullcontext

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from lorikeet.addresses import Address
from lorikeet.errors import InvalidSetting, Overloaded
from lorikeet.gateway.app import RequestMiddleware
from lorikeet.gateway.error_responses import add_error_handlers, error_response
from lorikeet.gateway.generate import UNVERSIONED
from lorikeet.gateway.http_protocol import BoundedHttpProtocol
from lorikeet.gateway.routes.health import LIVENESS, READINESS
from lorikeet.retry_after import FULL_GATEWAY_S

log = logging.getLogger(__name__)

_PROBES = (LIVENESS, *READINESS)
_LAST_REQUESTS_S = 20  # time for requests to finish when the gateway ends


class PublicListener:
    """ASGI wrapper that passes on health probes and tenants' paths; answers others with 404.

    paths, prefixes: tenants' paths, and beginnings of tenants' paths, beside `/v1/`, UNVERSIONED
        and the page at `/ui`.
    max_requests: maximum number of requests at once; None: no limit. Further requests are refused,
        except probes. Must be less than the number that Serve sends this gateway at once, or health
        checks would queue.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_requests: int | None = None,
        paths: Collection[str] = (),
        prefixes: Collection[str] = (),
    ) -> None:
        self._app, self._paths = app, {"/ui", *UNVERSIONED, *paths}
        self._prefixes = "/v1/", "/ui/", *prefixes
        self._max_requests, self._requests = max_requests, 0
        self._full = RequestMiddleware(_refuse_full)
        self._nothing = FastAPI(openapi_url=None, redirect_slashes=False)
        self._nothing.add_middleware(RequestMiddleware)
        add_error_handlers(self._nothing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on probes and requests for paths that tenants may use; answer others with 404."""
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
        is_tenants = path.startswith(self._prefixes) or path in self._paths
        return self._app if is_tenants else self._nothing


class AdminListener:
    """HTTP listener for operators, at an address that the gateways of one host share
    (SO_REUSEPORT).

    The kernel gives each connection to one of the listening gateways. The constructor binds the
    address, and raises InvalidSetting if it cannot; no connection is accepted before the
    application runs.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._socket = _bind(address)

    def open_with(self, app: FastAPI) -> None:
        """Make the application accept connections at this listener's address, from after its
        startup until before its shutdown.
        """
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
                lifespan="off",  # the application runs already
                http=BoundedHttpProtocol,
                ws="none",
                access_log=False,
                log_config=None,
                log_level=logging.CRITICAL,  # it would log exceptions, which may quote a prompt
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
    """uvicorn server that installs no signal handlers: its process handles signals."""

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
            f"LORIKEET_ADMIN_ADDRESS={address}: {error.strerror}: stop what listens there, or give"
            " another address of this machine"
        ) from error
    return bound
