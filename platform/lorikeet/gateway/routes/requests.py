"""Explained requests.

GET /v1/requests explains a tenant's last requests, GET /v1/requests/{id} one of them, and
GET /admin/v1/requests/{id} any request.
"""

from typing import Any

from fastapi import APIRouter, Request

from lorikeet.gateway.reads import TenantReads
from lorikeet.request_log.request_log import RequestLog

_READS = 5
"""Number of reads that explanations cost, because all gateways may be asked for them."""


def request_routes(reads: TenantReads, request_log: RequestLog) -> APIRouter:
    """Return the routes that list a tenant's recent requests and tell how one was served.

    reads: check of each request's key and of its tenant's limit on reads.
    """
    router = APIRouter(prefix="/v1/requests")

    @router.get("")
    async def recent(request: Request) -> dict[str, Any]:
        async with reads.admitted(request, _READS) as caller:
            return await request_log.recent(caller.tenant.name)

    @router.get("/{request_id}")
    async def why(request: Request, request_id: str) -> dict[str, Any]:
        async with reads.admitted(request, _READS) as caller:
            return await request_log.find(request_id, caller.tenant.name)

    return router


def admin_request_routes(request_log: RequestLog) -> APIRouter:
    """Return the admin route that tells how a request of any tenant was served."""
    router = APIRouter(prefix="/requests")

    @router.get("/{request_id}")
    async def why(request_id: str) -> dict[str, Any]:
        return await request_log.find(request_id)

    return router
