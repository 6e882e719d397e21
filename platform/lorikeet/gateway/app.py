"""The gateway: an ASGI application that knows nothing of Ray."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from lorikeet.gateway.admin.routes import admin_routes
from lorikeet.gateway.apis.openapi import openapi_routes
from lorikeet.gateway.auth import RequestAuthenticator
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.error_responses import add_error_handlers
from lorikeet.gateway.generate import generate_routes
from lorikeet.gateway.limit_sync import LimitSync
from lorikeet.gateway.middleware import RequestMiddleware
from lorikeet.gateway.routes.metrics import Scrape, add_gauges, metrics_routes, request_counter
from lorikeet.gateway.routes.models import model_routes
from lorikeet.gateway.routes.requests import request_routes
from lorikeet.gateway.routes.usage import UsageReports, usage_routes
from lorikeet.gateway.services import Services
from lorikeet.request_log.recent_traffic import RecentTraffic
from lorikeet.request_log.request_log import RequestLog
from lorikeet.tenancy import LimitShares, MonthlyBudget, RateLimiter
from lorikeet.ui.routes import ui_routes


def create_app(services: Services) -> FastAPI:
    """Build the application. Its lifespan reads the catalog and keeps following it.

    Starting raises StoreError when there is no catalog to read.
    """
    catalog_view = GatewayCatalogView(services.catalog, services.refresh_s)
    authenticator = RequestAuthenticator(services, catalog_view)
    shares = LimitShares(services.name, services.gateways, time.monotonic())
    rate_limiter = _rate_limiter(services, shares)
    limit_sync = LimitSync(services.peers, shares, rate_limiter)
    request_log = _request_log(services)
    traffic = RecentTraffic(services.peers, request_log)
    add_gauges(services, request_log, catalog_view)
    usage = UsageReports(services.catalog.store)

    app = FastAPI(
        title="Lorikeet",
        lifespan=lambda _: _running(services, catalog_view, limit_sync),
        openapi_url=None,  # nothing is told to who has no key
        # FastAPI's own would tell what exceptions say, and they may quote prompts.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        redirect_slashes=False,
    )
    app.add_middleware(RequestMiddleware)
    add_error_handlers(app)
    app.router.routes += generate_routes(services, authenticator, rate_limiter, request_log)
    for router in (
        request_routes(authenticator, request_log),
        usage_routes(authenticator, usage),
        model_routes(services, authenticator, catalog_view),
        openapi_routes(authenticator),
        admin_routes(services, authenticator, catalog_view, request_log, usage, traffic),
        ui_routes(),
        metrics_routes(authenticator, Scrape(services)),
    ):
        app.include_router(router)
    app.add_api_route("/healthz", healthz)
    return app


async def healthz() -> dict[str, str]:
    """Answer that this gateway is alive and started. Needs no key."""
    return {"status": "ok"}


def _rate_limiter(services: Services, shares: LimitShares) -> RateLimiter:
    return RateLimiter(
        shares,
        MonthlyBudget(services.recorded_usage, services.recorded_usage_delay_s),
        services.max_open_requests,
        max_running=services.max_running,
        max_queue_s=services.max_queue_s,
    )


def _request_log(services: Services) -> RequestLog:
    request_log = RequestLog(services.peers)
    request_log.subscribe(request_counter(services.metrics))
    if services.traces is not None:
        request_log.subscribe(services.traces.ended)
    return request_log


@asynccontextmanager
async def _running(
    services: Services, catalog_view: GatewayCatalogView, limit_sync: LimitSync
) -> AsyncGenerator[None, None]:
    await asyncio.to_thread(services.catalog.refresh)
    tasks = [asyncio.create_task(each) for each in (catalog_view.follow(), limit_sync.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if services.traces is not None:
            await services.traces.close()
