"""Admin routes: pins."""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from lorikeet.api.admin.documents import pin_json
from lorikeet.api.body import Body, json_body
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.gate import Actor
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.pin_terms import LONGEST_PIN_S, LONGEST_REASON
from lorikeet_engine.adapter import Residency


class Pin(Body):
    """A promise of residency. replicas null: on all; expires_s: seconds from now."""

    selector: str = DEFAULT_ALIAS
    replicas: Annotated[int, Field(ge=1)] | None = None
    tier: Literal["gpu", "host", "disk"] = "gpu"
    reason: Annotated[str, Field(max_length=LONGEST_REASON)] = ""
    expires_s: Annotated[float, Field(gt=0, le=LONGEST_PIN_S)] | None = None


def pin_routes(catalog: AdapterCatalog, follower: CatalogFollower) -> APIRouter:
    """List, set, take away."""
    router = APIRouter(prefix="/pins")

    @router.get("")
    async def list_pins() -> dict[str, Any]:
        pins = await follower.survey(lambda state: state.pins(time.time()))
        return {"data": list(map(pin_json, pins))}

    @router.put("/{tenant}/{name}")
    def pin(
        tenant: str, name: str, wanted: Annotated[Pin, json_body(Pin)], actor: Actor
    ) -> dict[str, Any]:
        record = catalog.pin(
            tenant,
            name,
            selector=wanted.selector,
            tier=Residency[wanted.tier.upper()],
            replicas=wanted.replicas,
            reason=wanted.reason,
            expires=None if wanted.expires_s is None else time.time() + wanted.expires_s,
            actor=actor,
        )
        return pin_json(record)

    @router.delete("/{tenant}/{name}")
    def unpin(tenant: str, name: str, actor: Actor) -> dict[str, Any]:
        catalog.unpin(tenant, name, actor=actor)
        return {"adapter": f"{tenant}/{name}", "pinned": False}

    return router
