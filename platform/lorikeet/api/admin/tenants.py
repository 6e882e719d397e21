"""Admin routes: tenants and their keys."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from lorikeet.api.admin.documents import key_json, tenant_json
from lorikeet.api.body import Body, json_body
from lorikeet.api.errors import CREATED
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.gate import Actor
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope


class Tenant(Body):
    """A tenant's limits; max_concurrent null: none."""

    max_concurrent: Annotated[int, Field(ge=1)] | None = None


class TenantKey(Body):
    """A tenant's key. Tenants infer; they do not administer."""

    scopes: list[Literal["infer"]] = Field([Scope.INFER.value], min_length=1, max_length=1)


def tenant_routes(catalog: AdapterCatalog, follower: CatalogFollower) -> APIRouter:
    """List and save tenants; list and make their keys."""
    router = APIRouter(prefix="/tenants")

    @router.get("")
    async def list_tenants() -> dict[str, Any]:
        state = await follower.refreshed()
        return {"data": [tenant_json(tenant) for tenant in state.tenants()]}

    @router.put("/{tenant}")
    def save(
        tenant: str, wanted: Annotated[Tenant, json_body(Tenant)], actor: Actor
    ) -> dict[str, Any]:
        return tenant_json(catalog.create_tenant(tenant, wanted.max_concurrent, actor=actor))

    @router.get("/{tenant}/keys")
    async def list_keys(tenant: str) -> dict[str, Any]:
        state = await follower.refreshed()
        state.tenant(tenant)
        keys = (key for key in state.key_records.values() if key.tenant == tenant)
        return {"data": [key_json(key) for key in keys]}

    @router.post("/{tenant}/keys", status_code=CREATED)
    def create_key(
        tenant: str, wanted: Annotated[TenantKey, json_body(TenantKey)], actor: Actor
    ) -> dict[str, Any]:
        scopes = [Scope(scope) for scope in wanted.scopes]
        record, secret = catalog.create_key(tenant, scopes, actor=actor)
        return {**key_json(record), "key": secret}

    return router
