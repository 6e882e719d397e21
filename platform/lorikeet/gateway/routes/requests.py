"""Explained requests: GET /v1/requests/{id} for a tenant's own, GET /admin/v1/requests/{id} for
all.
"""

from typing import Any

from fastapi import APIRouter, Request

from lorikeet.gateway.auth import RequestAuthenticator
from lorikeet.request_log.request_log import RequestLog


def request_routes(authenticator: RequestAuthenticator, request_log: RequestLog) -> APIRouter:
    """Return the route that explains a tenant's own requests."""
    router = APIRouter(prefix="/v1/requests")

    @router.get("/{request_id}")
    async def why(request: Request, request_id: str) -> dict[str, Any]:
        tenant = await authenticator.tenant(request)
        return await request_log.find(request_id, tenant.name)

    return router


def admin_request_routes(request_log: RequestLog) -> APIRouter:
    """Return the admin route that explains any request."""
    router = APIRouter(prefix="/requests")

    @router.get("/{request_id}")
    async def why(request_id: str) -> dict[str, Any]:
        return await request_log.find(request_id)

    return router
