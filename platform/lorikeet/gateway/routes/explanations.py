"""GET /v1/requests/{id} for a tenant's own requests, GET /admin/v1/requests/{id} for all."""

from typing import Any

from fastapi import APIRouter, Request

from lorikeet.gateway.authentication import RequestAuthenticator
from lorikeet.request_log.explanations import Explanations


def explain_routes(gate: RequestAuthenticator, explanations: Explanations) -> APIRouter:
    """A tenant asks about its own requests."""
    router = APIRouter(prefix="/v1/requests")

    @router.get("/{request_id}")
    async def why(request: Request, request_id: str) -> dict[str, Any]:
        tenant = await gate.tenant(request)
        return await explanations.find(request_id, tenant.name)

    return router


def admin_explain_routes(explanations: Explanations) -> APIRouter:
    """An admin asks about any."""
    router = APIRouter(prefix="/requests")

    @router.get("/{request_id}")
    async def why(request_id: str) -> dict[str, Any]:
        return await explanations.find(request_id)

    return router
