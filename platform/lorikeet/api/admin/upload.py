"""Admin route: a blob in one request becomes a version, validated before anything is stored."""

import tempfile
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from lorikeet.api.admin.registration import Order, Registration
from lorikeet.api.body_file import receive
from lorikeet.api.errors import CREATED, OK
from lorikeet.api.gate import Actor


def upload_routes(registration: Registration) -> APIRouter:
    """PUT of an adapter's blob."""
    router = APIRouter(prefix="/adapters")

    @router.put("/{tenant}/{name}/versions")
    async def register(
        request: Request,
        response: Response,
        tenant: str,
        name: str,
        actor: Actor,
        promote: bool = False,
        shared: bool | None = None,
        base_model: str | None = None,
    ) -> dict[str, Any]:
        order = Order(tenant, name, actor, promote, shared, base_model)
        limits = await registration.check(tenant, base_model)
        with tempfile.TemporaryDirectory(prefix="lorikeet-upload-") as folder:
            blob = Path(folder) / "adapter.safetensors"
            await receive(request, blob, limits.max_bytes, registration.workers)
            facts = await registration.examine(order, blob)
            version, is_new = await registration.record(order, blob, facts)
        response.status_code = CREATED if is_new else OK
        return version

    return router
