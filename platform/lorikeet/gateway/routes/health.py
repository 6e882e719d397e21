"""Probes: `/healthz` for liveness; `/readyz`, and `/health` as in vLLM, for readiness."""

from fastapi import APIRouter

from lorikeet.errors import Unavailable
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.services import EngineClient
from lorikeet.retry_after import NO_REPLICA_S, STORE_AWAY_S

LIVENESS, READINESS = "/healthz", ("/readyz", "/health")
_OK = {"status": "ok"}


def health_routes(engines: EngineClient, catalog_view: GatewayCatalogView) -> APIRouter:
    """Return the routes for probes, load balancers and clients, which need no key."""
    router = APIRouter()

    @router.get(LIVENESS)
    async def is_alive() -> dict[str, str]:
        """Answer that this gateway has started."""
        return _OK

    async def is_ready() -> dict[str, str]:
        """Answer 200 if an engine is ready and the catalog was read, else 503."""
        if catalog_view.state.seq == 0:
            message = "the catalog has not been read yet: the log says catalog_unreachable and why"
            raise Unavailable(message, retry_after_s=STORE_AWAY_S)
        if not engines.ready():
            message = "no engine serves: one is starting, or the log says start_failed and why"
            raise Unavailable(message, retry_after_s=NO_REPLICA_S)
        return _OK

    for path in READINESS:
        router.add_api_route(path, is_ready)
    return router
