"""Admin routes: admins' keys, and the revocation of any key."""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from lorikeet.api.admin.documents import key_json
from lorikeet.api.body import Body, read_json
from lorikeet.api.errors import CREATED
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.gate import actor_of
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope


class AdminKey(Body):
    """An admin's key. Admins administer; they do not infer."""

    scopes: list[Literal["admin"]] = Field([Scope.ADMIN.value], min_length=1, max_length=1)


def key_routes(catalog: AdapterCatalog, follower: CatalogFollower) -> APIRouter:
    """List all keys, make an admin's, revoke any."""
    router = APIRouter(prefix="/keys")

    @router.get("")
    async def list_keys() -> dict[str, Any]:
        state = await follower.refreshed()
        return {"data": [key_json(key) for key in state.key_records.values()]}

    @router.post("", status_code=CREATED)
    async def create(request: Request) -> dict[str, Any]:
        body = await read_json(request, AdminKey)
        record, secret = await asyncio.to_thread(
            catalog.create_key,
            None,
            [Scope(scope) for scope in body.scopes],
            actor=actor_of(request),
        )
        return {**key_json(record), "key": secret}

    @router.delete("/{key_id}")
    async def revoke(request: Request, key_id: str) -> dict[str, Any]:
        record = await asyncio.to_thread(catalog.revoke_key, key_id, actor=actor_of(request))
        return key_json(record)

    return router
