"""Admin route: what became of a request, and why."""

from typing import Any

from fastapi import APIRouter

from lorikeet.api.explain import Explanations


def request_routes(explanations: Explanations) -> APIRouter:
    """GET /requests/{request_id}."""
    router = APIRouter(prefix="/requests")

    @router.get("/{request_id}")
    async def why(request_id: str) -> dict[str, Any]:
        return await explanations.find(request_id)

    return router
