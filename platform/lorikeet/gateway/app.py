"""The gateway's ASGI application, free of Ray, and the middleware around every request."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.apis.errors import ClientApi
from lorikeet.errors import Unavailable
from lorikeet.gateway.admin.registration import Registration
from lorikeet.gateway.admin.routes import admin_routes
from lorikeet.gateway.audit import AuditMiddleware, AuditStream
from lorikeet.gateway.auth import RequestAuthenticator
from lorikeet.gateway.batches.runner import BatchRunner
from lorikeet.gateway.body import LargeBodies
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.error_responses import (
    add_error_handlers,
    client_api,
    error_response,
    internal_error_response,
    websocket_refusal,
)
from lorikeet.gateway.generate import GenerateEndpoint, generate_routes
from lorikeet.gateway.limit_sync import LimitSync
from lorikeet.gateway.pushing.push_pipeline import PushPipeline
from lorikeet.gateway.pushing.routes import PushEndpoints, push_routes
from lorikeet.gateway.reads import TenantReads
from lorikeet.gateway.routes.batches import batch_routes
from lorikeet.gateway.routes.files import StoredFiles, file_routes
from lorikeet.gateway.routes.health import health_routes
from lorikeet.gateway.routes.limits import FilesUse, limit_routes
from lorikeet.gateway.routes.metrics import Scrape, add_gauges, metrics_routes
from lorikeet.gateway.routes.models import model_routes
from lorikeet.gateway.routes.openapi import openapi_routes
from lorikeet.gateway.routes.requests import request_routes
from lorikeet.gateway.routes.responses import response_routes
from lorikeet.gateway.routes.usage import UsageReports, usage_routes
from lorikeet.gateway.services import Services
from lorikeet.gateway.stored_responses import StoredResponses
from lorikeet.gateway.tinker.requests import SampleRequest
from lorikeet.gateway.tinker.routes import tinker_routes
from lorikeet.gateway.tinker.sample_futures import SampleFutures
from lorikeet.gateway.vllm.generate_request import InferenceRequest
from lorikeet.gateway.vllm.requests import GENERATE
from lorikeet.gateway.vllm.routes import VllmEndpoints, vllm_routes
from lorikeet.gateway.vllm.tokens import token_routes
from lorikeet.logs import log_unexpected
from lorikeet.request_log.recent_traffic import RecentTraffic
from lorikeet.request_log.request_log import RequestLog
from lorikeet.tenancy.limit_shares import LimitShares
from lorikeet.tenancy.monthly_budget import MonthlyBudget
from lorikeet.tenancy.rate_limiter import RateLimiter
from lorikeet.tenancy.read_limiter import ReadLimiter
from lorikeet.ui.routes import ui_routes
from lorikeet.usage.writer import UsageWriter

REQUEST_ID_HEADER = "x-request-id"
_WRITTEN_FLUSHES = 2  # flushes after which usage is in the store, if the store is reachable
_LAST_FLUSH_S = 10.0
_BATCH_LINES = 16  # answered at once if the replicas' number of running requests is not known


def create_app(services: Services) -> FastAPI:
    """Build the gateway's application. A running application keeps the catalog's view up to date.

    If the store is unreachable, the application starts with the view of the catalog that a gateway
    saved on this machine. Without a saved view it answers 503 until the store is reachable.
    """
    catalog_view = GatewayCatalogView(
        services.catalog.reader, services.refresh_s, services.kept_view
    )
    pipeline = PushPipeline(services, catalog_view)
    authenticator = RequestAuthenticator(services, catalog_view, pipeline.pushed)
    shares = LimitShares(services.name, services.gateways, time.monotonic())
    rate_limiter = _rate_limiter(services, shares)
    limit_sync = LimitSync(services.peers, shares, rate_limiter)
    request_log = RequestLog(services.peers)
    traffic = RecentTraffic(services.peers, request_log)
    _subscribe(request_log, services, traffic)
    add_gauges(services, request_log, catalog_view)
    usage = UsageReports(services.catalog.store)
    read_limiter = ReadLimiter()
    reads = TenantReads(authenticator, read_limiter)

    futures = SampleFutures(services.peers, services.gateways)
    stored = StoredResponses(services.responses, services.metrics)
    registration = Registration(services, catalog_view)
    of_pushes = Registration(services, catalog_view)  # own threads: uploads may hang at the store
    checks = services, authenticator, rate_limiter, request_log
    bodies = LargeBodies()
    lines = _bare_application()
    lines.router.routes += generate_routes(*checks, stored, read_limiter, of_batches=True)
    runner = _batch_runner(services, lines, catalog_view, rate_limiter)
    files = StoredFiles(services.files)
    app = _application(services, catalog_view, limit_sync, pipeline, runner, futures)
    app.router.routes += generate_routes(*checks, stored, read_limiter)
    pushes = PushEndpoints(*checks, catalog_view, of_pushes, pipeline, read_limiter)
    if services.load_from is not None:
        parts = catalog_view, of_pushes, pipeline, pushes, read_limiter
        vllm = VllmEndpoints(services, *parts, services.load_from)
        app.router.routes += vllm_routes(vllm).routes
        app.router.routes += token_routes(services, authenticator, reads).routes
        rollouts = GenerateEndpoint(InferenceRequest, *checks, stored, read_limiter, bodies)
        app.router.routes.append(Route(GENERATE, rollouts, methods=["POST"]))
    if services.tinker:
        sampling = GenerateEndpoint(SampleRequest, *checks, stored, read_limiter, bodies)
        app.router.routes += tinker_routes(services, authenticator, reads, sampling, futures).routes
    for router in (
        request_routes(reads, request_log),
        usage_routes(reads, usage),
        limit_routes(reads, rate_limiter, catalog_view, FilesUse(files, services.batches)),
        model_routes(services, authenticator, reads),
        response_routes(authenticator, rate_limiter, request_log, stored, read_limiter),
        file_routes(reads, files),
        batch_routes(authenticator, reads, files, runner),
        push_routes(pushes),
        openapi_routes(
            reads, with_vllm=services.load_from is not None, with_tinker=services.tinker
        ),
        admin_routes(
            services, authenticator, catalog_view, registration, request_log, usage, traffic
        ),
        ui_routes(),
        metrics_routes(authenticator, Scrape(services)),
        health_routes(services.engines, catalog_view),
    ):
        app.router.routes += router.routes  # include_router would build each route again
    return app


def _application(
    services: Services,
    catalog_view: GatewayCatalogView,
    limit_sync: LimitSync,
    pipeline: PushPipeline,
    runner: BatchRunner | None,
    futures: SampleFutures,
) -> FastAPI:
    """Build the application with its lifespan and middleware, but without its routes.

    catalog_view, limit_sync, pipeline, runner, futures: parts whose background work the lifespan
        starts or ends.
    """
    return _bare_application(
        lambda _: _running(services, catalog_view, limit_sync, pipeline, runner, futures),
        services.audit,
    )


def _bare_application(
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    audit: AuditStream | None = None,
) -> FastAPI:
    """Build an application with its middleware and error handlers, without routes.

    lifespan: context in which the application runs.
    audit: stream of admins' changes; None: they are not written.
    """
    app = FastAPI(
        title="Lorikeet",
        lifespan=lifespan,
        openapi_url=None,  # callers without a key learn nothing
        # FastAPI's telemetry would export exception messages, which may quote prompts.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        redirect_slashes=False,
    )
    app.add_middleware(RequestMiddleware)
    if audit is not None:
        app.add_middleware(AuditMiddleware, stream=audit)  # outside, to see a failure's status
    add_error_handlers(app)
    return app


def _batch_runner(
    services: Services,
    lines: FastAPI,
    catalog_view: GatewayCatalogView,
    rate_limiter: RateLimiter,
) -> BatchRunner | None:
    """Return the loop that runs batches; None if batches are off.

    lines: application that answers lines, the requests of batches.
    rate_limiter: counts the other requests of this gateway.
    """
    if services.files is None or services.batches is None:
        return None
    at_once = services.gateways * max(services.max_running.values(), default=_BATCH_LINES)

    async def lines_of(tenant: str) -> int | None:
        own = await catalog_view.ask(lambda state: state.tenant(tenant).batch_lines)
        return None if own is None else max(1, own // services.gateways)

    return BatchRunner(
        services.batches,
        services.files,
        lines,
        at_once,
        lines_of,
        lambda: rate_limiter.running > 0,
    )


def _rate_limiter(services: Services, shares: LimitShares) -> RateLimiter:
    return RateLimiter(
        shares,
        MonthlyBudget(services.recorded_usage, _WRITTEN_FLUSHES * services.usage_flush_s),
        services.max_open_requests,
        max_running=services.max_running,
        max_queue_s=services.max_queue_s,
    )


def _subscribe(request_log: RequestLog, services: Services, traffic: RecentTraffic) -> None:
    request_log.subscribe(services.metrics.count)
    request_log.subscribe(traffic.ended)
    if services.traces is not None:
        request_log.subscribe(services.traces.ended)


@asynccontextmanager
async def _running(
    services: Services,
    catalog_view: GatewayCatalogView,
    limit_sync: LimitSync,
    pipeline: PushPipeline,
    runner: BatchRunner | None,
    futures: SampleFutures,
) -> AsyncGenerator[None, None]:
    await catalog_view.start()
    work = [catalog_view.follow(), catalog_view.keep(), limit_sync.run()]
    if runner is not None:
        work.append(runner.run())
    tasks = [asyncio.create_task(each) for each in work]
    usage = UsageWriter(services.catalog.store, services.usage, services.usage_flush_s)
    usage.start()
    try:
        yield
    finally:
        await futures.close()
        await pipeline.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # runs of batches commit their results
        await asyncio.to_thread(usage.close, _LAST_FLUSH_S)
        services.encoders.close()
        if services.traces is not None:
            await services.traces.close()
        if services.audit is not None:
            await asyncio.to_thread(services.audit.close)


class RequestMiddleware:
    """Middleware that gives each request an id, and turns an unexpected exception into a 500
    without details.

    Clients cannot choose the id: two clients could choose the same.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the request's id and pass the request on to the application."""
        if scope["type"] != "http":
            app = websocket_refusal(scope) if scope["type"] == "websocket" else self._app
            await app(scope, receive, send)
            return
        request_id = scope.setdefault("state", {})["request_id"] = uuid.uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                if client_api(scope) is ClientApi.ANTHROPIC:
                    headers["request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # the client left before its body was parsed, so no response can be sent
        except asyncio.CancelledError:  # the server ends, or the client has left
            if not started:
                ending = Unavailable("this gateway ends: send it again")
                await error_response(ending, scope)(scope, receive, send_with_id)
            raise
        except Exception as error:
            log_unexpected("request_failed", request_id, error)
            if started:
                raise
            await internal_error_response(scope)(scope, receive, send_with_id)
