"""The gateway: an ASGI application that knows nothing of Ray."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from lorikeet.api.admin.routes import admin_routes
from lorikeet.api.errors import add_error_handlers
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.gate import Gate
from lorikeet.api.generate import generate_routes
from lorikeet.api.models import model_routes
from lorikeet.api.request_scope import RequestScope
from lorikeet.api.services import BaseModel, EngineClient, Services

__all__ = ["BaseModel", "EngineClient", "Services", "create_app"]


def create_app(services: Services) -> FastAPI:
    """Build the application. Its lifespan reads the catalog and keeps following it.

    Starting raises StoreError when there is no catalog to read.
    """
    follower = CatalogFollower(services.catalog, services.refresh_s)
    gate = Gate(services, follower)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        await asyncio.to_thread(services.catalog.refresh)
        following = asyncio.create_task(follower.follow())
        try:
            yield
        finally:
            following.cancel()

    app = FastAPI(
        title="Lorikeet",
        lifespan=lifespan,
        openapi_url=None,  # nothing is told to who has no key
        redirect_slashes=False,
    )
    app.add_middleware(RequestScope)
    add_error_handlers(app)
    app.include_router(generate_routes(services, gate))
    app.include_router(model_routes(services, gate, follower))
    app.include_router(admin_routes(services, gate, follower))

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Alive and started. Needs no key."""
        return {"status": "ok"}

    return app
