"""Admin routes: tenants and their keys."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from lorikeet.api.admin.documents import key_json, list_answer, tenant_json
from lorikeet.api.body import Body, json_body
from lorikeet.api.errors import CREATED
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.gate import Actor
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope


class Limit(Body):
    """How many requests of a tenant may run at once; max_concurrent null: any number."""

    max_concurrent: Annotated[int, Field(ge=1)] | None = None


class Tenant(Limit):
    """A new tenant and its limit."""

    tenant: str


class PinBudget(Body):
    """What the images of a tenant's pinned adapters may take on one replica; null: no limit."""

    pin_budget_bytes: Annotated[int, Field(ge=1)] | None = None


class OfAdapters(Body):
    """How large a new adapter of a tenant may be; null: what the service lets in."""

    max_rank: Annotated[int, Field(ge=1)] | None = None
    max_adapter_bytes: Annotated[int, Field(ge=1)] | None = None


class TenantKey(Body):
    """A tenant's key. Tenants infer; they do not administer."""

    scopes: list[Literal["infer"]] = Field([Scope.INFER.value], min_length=1, max_length=1)


def tenant_routes(catalog: AdapterCatalog, follower: CatalogFollower) -> APIRouter:
    """List, make and limit tenants; list and make their keys."""
    router = APIRouter(prefix="/tenants")

    @router.get("", response_model=None)
    async def list_tenants() -> Response:
        return await follower.survey(lambda state: list_answer(map(tenant_json, state.tenants())))

    @router.post("", status_code=CREATED)
    def create(wanted: Annotated[Tenant, json_body(Tenant)], actor: Actor) -> dict[str, Any]:
        return tenant_json(catalog.create_tenant(wanted.tenant, wanted.max_concurrent, actor=actor))

    @router.put("/{tenant}")
    def limit(
        tenant: str, wanted: Annotated[Limit, json_body(Limit)], actor: Actor
    ) -> dict[str, Any]:
        return tenant_json(catalog.limit_tenant(tenant, wanted.max_concurrent, actor=actor))

    @router.put("/{tenant}/pin-budget")
    def set_pin_budget(
        tenant: str, wanted: Annotated[PinBudget, json_body(PinBudget)], actor: Actor
    ) -> dict[str, Any]:
        record = catalog.set_pin_budget(tenant, wanted.pin_budget_bytes, actor=actor)
        return tenant_json(record)

    @router.put("/{tenant}/adapter-limits")
    def set_adapter_limits(
        tenant: str, wanted: Annotated[OfAdapters, json_body(OfAdapters)], actor: Actor
    ) -> dict[str, Any]:
        record = catalog.set_adapter_limits(
            tenant, wanted.max_rank, wanted.max_adapter_bytes, actor=actor
        )
        return tenant_json(record)

    @router.get("/{tenant}/keys")
    async def list_keys(tenant: str) -> dict[str, Any]:
        keys = await follower.survey(lambda state: state.keys(tenant))
        return {"data": list(map(key_json, keys))}

    @router.post("/{tenant}/keys", status_code=CREATED)
    def create_key(
        tenant: str, wanted: Annotated[TenantKey, json_body(TenantKey)], actor: Actor
    ) -> dict[str, Any]:
        scopes = [Scope(scope) for scope in wanted.scopes]
        record, secret = catalog.create_key(tenant, scopes, actor=actor)
        return {**key_json(record), "key": secret}

    return router
