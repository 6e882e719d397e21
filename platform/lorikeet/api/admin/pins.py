"""Admin routes: pins."""

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from lorikeet.api.admin.documents import pin_json
from lorikeet.api.body import Body, read_json
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.gate import actor_of
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet_engine.adapter import Residency


class Pin(Body):
    """A promise of residency. replicas null: on all; expires_s: seconds from now."""

    selector: str = DEFAULT_ALIAS
    replicas: Annotated[int, Field(ge=1)] | None = None
    tier: Literal["gpu", "host", "disk"] = "gpu"
    reason: Annotated[str, Field(max_length=1000)] = ""
    expires_s: Annotated[float, Field(gt=0)] | None = None


def pin_routes(catalog: AdapterCatalog, follower: CatalogFollower) -> APIRouter:
    """List, set, take away."""
    router = APIRouter(prefix="/pins")

    @router.get("")
    async def list_pins() -> dict[str, Any]:
        state = await follower.refreshed()
        return {"data": [pin_json(pin) for pin in state.pins(time.time())]}

    @router.put("/{tenant}/{name}")
    async def pin(request: Request, tenant: str, name: str) -> dict[str, Any]:
        body = await read_json(request, Pin)
        record = await asyncio.to_thread(
            catalog.pin,
            tenant,
            name,
            selector=body.selector,
            tier=Residency[body.tier.upper()],
            replicas=body.replicas,
            reason=body.reason,
            expires=None if body.expires_s is None else time.time() + body.expires_s,
            actor=actor_of(request),
        )
        return pin_json(record)

    @router.delete("/{tenant}/{name}")
    async def unpin(request: Request, tenant: str, name: str) -> dict[str, Any]:
        await asyncio.to_thread(catalog.unpin, tenant, name, actor=actor_of(request))
        return {"adapter": f"{tenant}/{name}", "pinned": False}

    return router
