"""Admin routes: tenants and their keys."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from lorikeet.api.admin.documents import key_json, tenant_json
from lorikeet.api.body import Body, read_json
from lorikeet.api.errors import CREATED
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.gate import actor_of
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
    async def save(request: Request, tenant: str) -> dict[str, Any]:
        body = await read_json(request, Tenant)
        record = await asyncio.to_thread(
            catalog.create_tenant, tenant, body.max_concurrent, actor=actor_of(request)
        )
        return tenant_json(record)

    @router.get("/{tenant}/keys")
    async def list_keys(tenant: str) -> dict[str, Any]:
        state = await follower.refreshed()
        state.tenant(tenant)
        keys = (key for key in state.key_records.values() if key.tenant == tenant)
        return {"data": [key_json(key) for key in keys]}

    @router.post("/{tenant}/keys", status_code=CREATED)
    async def create_key(request: Request, tenant: str) -> dict[str, Any]:
        body = await read_json(request, TenantKey)
        record, secret = await asyncio.to_thread(
            catalog.create_key,
            tenant,
            [Scope(scope) for scope in body.scopes],
            actor=actor_of(request),
        )
        return {**key_json(record), "key": secret}

    return router
