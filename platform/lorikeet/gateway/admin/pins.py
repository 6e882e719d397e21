"""Admin routes of pins (orders to keep an adapter on disk, in host memory or on the GPU): list,
set, dry-run, remove.
"""

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from lorikeet.apis.body import Body
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.rules.limits import HIGHEST_PRIORITY, LONGEST_LIFE_S
from lorikeet.catalog.rules.pins import LONGEST_REASON, PinOptions
from lorikeet.gateway.admin.pin_report import PinReporter
from lorikeet.gateway.admin.serializers import dry_run_json, pin_json, pin_status_json
from lorikeet.gateway.auth import Actor
from lorikeet.gateway.body import json_body
from lorikeet_engine.adapter import Residency


class PinBody(Body):
    """Request to pin an adapter, or all adapters of a tenant.

    replicas: number of replicas that have to hold the adapter; null: all.
    expires_s: seconds from now until the pin ends; null: never.
    dry_run: do not set the pin, only show the loads and releases that it would cause.
    """

    selector: str = DEFAULT_ALIAS
    replicas: Annotated[int, Field(ge=1)] | None = None
    tier: Literal["gpu", "host", "disk"] = "gpu"
    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0
    reason: Annotated[str, Field(max_length=LONGEST_REASON)] = ""
    expires_s: Annotated[float, Field(gt=0, le=LONGEST_LIFE_S)] | None = None
    dry_run: bool = False


WantedPin = Annotated[PinBody, json_body(PinBody)]


def pin_routes(catalog: AdapterCatalog, pin_reporter: PinReporter) -> APIRouter:
    """Return the routes under /pins, for pins of adapters and of whole tenants."""
    router = APIRouter(prefix="/pins")

    @router.get("")
    async def list_pins() -> dict[str, Any]:
        return {"data": list(map(pin_status_json, await pin_reporter.pin_statuses()))}

    @router.put("/{tenant}")
    async def pin_tenant(tenant: str, wanted: WantedPin, actor: Actor) -> dict[str, Any]:
        return await pin(tenant, None, wanted, actor)

    @router.put("/{tenant}/{name}")
    async def pin_adapter(
        tenant: str, name: str, wanted: WantedPin, actor: Actor
    ) -> dict[str, Any]:
        return await pin(tenant, name, wanted, actor)

    @router.delete("/{tenant}")
    def unpin_tenant(tenant: str, actor: Actor) -> dict[str, Any]:
        catalog.unpin(tenant, None, actor=actor)
        return {"tenant": tenant, "adapter": None, "pinned": False}

    @router.delete("/{tenant}/{name}")
    def unpin_adapter(tenant: str, name: str, actor: Actor) -> dict[str, Any]:
        catalog.unpin(tenant, name, actor=actor)
        return {"tenant": tenant, "adapter": f"{tenant}/{name}", "pinned": False}

    async def pin(tenant: str, name: str | None, wanted: PinBody, actor: str) -> dict[str, Any]:
        terms = _terms(wanted)
        if wanted.dry_run:
            return dry_run_json(await pin_reporter.dry_run(tenant, name, **terms))
        made = await asyncio.to_thread(lambda: catalog.pin(tenant, name, actor=actor, **terms))
        return pin_json(made)

    return router


def _terms(wanted: PinBody) -> PinOptions:
    return PinOptions(
        selector=wanted.selector,
        tier=Residency[wanted.tier.upper()],
        replicas=wanted.replicas,
        priority=wanted.priority,
        reason=wanted.reason,
        expires=None if wanted.expires_s is None else time.time() + wanted.expires_s,
    )
