"""Admin routes: list, promote, roll back, retire adapters."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from lorikeet.api.admin.documents import adapter_json, version_json
from lorikeet.api.body import Body, read_json
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.gate import actor_of
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.records import AdapterRecord

Version = Annotated[int, Field(ge=1)]


class Promote(Body):
    """Point an alias to a version; expect: the version it must point to until now."""

    version: Version
    alias: str = DEFAULT_ALIAS
    expect: Version | None = None


class Rollback(Body):
    """Point an alias back to where it pointed before."""

    alias: str = DEFAULT_ALIAS


class Retire(Body):
    """End the use of one version, or of the adapter."""

    version: Version | None = None


def adapter_routes(catalog: AdapterCatalog, follower: CatalogFollower) -> APIRouter:
    """Everything but the upload of a version."""
    router = APIRouter(prefix="/adapters")

    @router.get("")
    async def list_adapters(tenant: str | None = None) -> dict[str, Any]:
        state = await follower.refreshed()
        if tenant is not None:
            state.tenant(tenant)
        return {"data": [adapter_json(adapter) for adapter in state.adapters(tenant)]}

    @router.get("/{tenant}/{name}")
    async def show(tenant: str, name: str) -> dict[str, Any]:
        return adapter_json((await follower.refreshed()).adapter(tenant, name))

    @router.post("/{tenant}/{name}/promote")
    async def promote(request: Request, tenant: str, name: str) -> dict[str, Any]:
        body = await read_json(request, Promote)
        record = await asyncio.to_thread(
            catalog.promote,
            tenant,
            name,
            body.version,
            body.alias,
            body.expect,
            actor=actor_of(request),
        )
        return _at_alias(record, body.alias)

    @router.post("/{tenant}/{name}/rollback")
    async def rollback(request: Request, tenant: str, name: str) -> dict[str, Any]:
        body = await read_json(request, Rollback)
        record = await asyncio.to_thread(
            catalog.rollback, tenant, name, body.alias, actor=actor_of(request)
        )
        return _at_alias(record, body.alias)

    @router.post("/{tenant}/{name}/retire")
    async def retire(request: Request, tenant: str, name: str) -> dict[str, Any]:
        body = await read_json(request, Retire)
        record = await asyncio.to_thread(
            catalog.retire, tenant, name, body.version, actor=actor_of(request)
        )
        return adapter_json(record)

    return router


def _at_alias(record: AdapterRecord, alias: str) -> dict[str, Any]:
    return version_json(record, record.versions[record.aliases[alias] - 1])
