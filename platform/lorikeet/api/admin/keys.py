"""Admin routes: admins' keys, and the revocation of any key."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from lorikeet.api.admin.documents import key_json, list_answer
from lorikeet.api.body import Body, json_body
from lorikeet.api.errors import CREATED
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.gate import Actor
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope


class AdminKey(Body):
    """An admin's key. Admins administer; they do not infer."""

    scopes: list[Literal["admin"]] = Field([Scope.ADMIN.value], min_length=1, max_length=1)


def key_routes(catalog: AdapterCatalog, follower: CatalogFollower) -> APIRouter:
    """List all keys, make an admin's, revoke any."""
    router = APIRouter(prefix="/keys")

    @router.get("", response_model=None)
    async def list_keys() -> Response:
        return await follower.survey(lambda state: list_answer(map(key_json, state.keys())))

    @router.post("", status_code=CREATED)
    def create(wanted: Annotated[AdminKey, json_body(AdminKey)], actor: Actor) -> dict[str, Any]:
        scopes = [Scope(scope) for scope in wanted.scopes]
        record, secret = catalog.create_key(None, scopes, actor=actor)
        return {**key_json(record), "key": secret}

    @router.delete("/{key_id}")
    def revoke(key_id: str, actor: Actor) -> dict[str, Any]:
        return key_json(catalog.revoke_key(key_id, actor=actor))

    return router
