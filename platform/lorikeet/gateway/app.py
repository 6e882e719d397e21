"""The gateway: an ASGI application that knows nothing of Ray."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from lorikeet.gateway.admin.routes import admin_routes
from lorikeet.gateway.apis.openapi import openapi_routes
from lorikeet.gateway.authentication import RequestAuthenticator
from lorikeet.gateway.catalog_follower import CatalogFollower
from lorikeet.gateway.error_responses import add_error_handlers
from lorikeet.gateway.generate import generate_routes
from lorikeet.gateway.limit_sync import LimitSync
from lorikeet.gateway.request_scope import RequestScope
from lorikeet.gateway.routes.explanations import explain_routes
from lorikeet.gateway.routes.metrics import Scrape, counting, metrics_routes, show
from lorikeet.gateway.routes.models import model_routes
from lorikeet.gateway.routes.usage import UsageReports, usage_routes
from lorikeet.gateway.services import BaseModel, EngineClient, Services
from lorikeet.request_log.explanations import Explanations
from lorikeet.request_log.traffic import Traffic
from lorikeet.tenancy import Budget, RateLimiter, Shares
from lorikeet.ui.routes import ui_routes

__all__ = ["BaseModel", "EngineClient", "Services", "create_app"]


def create_app(services: Services) -> FastAPI:
    """Build the application. Its lifespan reads the catalog and keeps following it.

    Starting raises StoreError when there is no catalog to read.
    """
    follower = CatalogFollower(services.catalog, services.refresh_s)
    gate = RequestAuthenticator(services, follower)
    shares = Shares(services.name, services.gateways, time.monotonic())
    budget = Budget(services.written, services.written_s)
    admission = RateLimiter(
        shares,
        budget,
        services.max_generations,
        seats=services.seats,
        max_queue_s=services.max_queue_s,
    )
    traces = services.traces
    explanations = Explanations(services.peers)
    traffic = Traffic(services.peers, explanations)
    explanations.tell(counting(services.metrics))
    if traces is not None:
        explanations.tell(traces.ended)
    show(services, explanations, follower)
    usage = UsageReports(services.catalog.store)
    reconciling = LimitSync(services.peers, shares, admission, budget)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        await asyncio.to_thread(services.catalog.refresh)
        tasks = [asyncio.create_task(each) for each in (follower.follow(), reconciling.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            if traces is not None:
                await traces.close()

    app = FastAPI(
        title="Lorikeet",
        lifespan=lifespan,
        openapi_url=None,  # nothing is told to who has no key
        # Its own would tell what exceptions say, and they may quote prompts: see api/tracing.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        redirect_slashes=False,
    )
    app.add_middleware(RequestScope)
    add_error_handlers(app)
    app.router.routes += generate_routes(services, gate, admission, explanations)
    app.include_router(explain_routes(gate, explanations))
    app.include_router(usage_routes(gate, usage))
    app.include_router(model_routes(services, gate, follower))
    app.include_router(openapi_routes(gate))
    app.include_router(admin_routes(services, gate, follower, explanations, usage, traffic))
    app.include_router(ui_routes())

    app.include_router(metrics_routes(gate, Scrape(services)))

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Alive and started. Needs no key."""
        return {"status": "ok"}

    return app
