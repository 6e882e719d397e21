"""Admin routes of API keys: create admins' keys; list, limit, rotate and revoke all keys."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from lorikeet.apis.body import Body
from lorikeet.catalog.catalog import LONGEST_OVERLAP_S, AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.gateway.admin.limit_bodies import KeyLimitsBody, NewKeyBody
from lorikeet.gateway.admin.serializers import key_json, list_response
from lorikeet.gateway.auth import Actor
from lorikeet.gateway.body import json_body
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.error_responses import CREATED


class AdminKey(NewKeyBody):
    """Request to create an admin's key, which can call admin routes but not generate."""

    scopes: list[Literal["admin", "read-only"]] = Field(
        [Scope.ADMIN.value], min_length=1, max_length=1
    )


class Rotation(Body):
    """Request to replace a key by a new one.

    overlap_s: seconds for which the old key still works beside the new one.
    """

    overlap_s: Annotated[float, Field(ge=0, le=LONGEST_OVERLAP_S)] = 86400


def key_routes(catalog: AdapterCatalog, catalog_view: GatewayCatalogView) -> APIRouter:
    """Return the routes under /keys, for the keys of admins and tenants."""
    router = APIRouter(prefix="/keys")

    @router.get("", response_model=None)
    async def list_keys() -> Response:
        return await catalog_view.ask_in_thread(
            lambda state: list_response(map(key_json, state.keys()))
        )

    @router.post("", status_code=CREATED)
    def create(wanted: Annotated[AdminKey, json_body(AdminKey)], actor: Actor) -> dict[str, Any]:
        return create_key(catalog, None, wanted.scopes, wanted, actor)

    @router.patch("/{key_id}")
    def limit(
        key_id: str, wanted: Annotated[KeyLimitsBody, json_body(KeyLimitsBody)], actor: Actor
    ) -> dict[str, Any]:
        return key_json(catalog.limit_key(key_id, actor=actor, **wanted.given()))

    @router.post("/{key_id}/rotate", status_code=CREATED)
    def rotate(
        key_id: str, wanted: Annotated[Rotation, json_body(Rotation)], actor: Actor
    ) -> dict[str, Any]:
        record, secret = catalog.rotate_key(key_id, wanted.overlap_s, actor=actor)
        replaced = catalog.reader.ask(lambda state: state.key(key_id))
        return {**key_json(record), "key": secret, "replaces": key_json(replaced)}

    @router.delete("/{key_id}")
    def revoke(key_id: str, actor: Actor) -> dict[str, Any]:
        return key_json(catalog.revoke_key(key_id, actor=actor))

    return router


def create_key(
    catalog: AdapterCatalog,
    tenant: str | None,
    scopes: Sequence[str],
    wanted: NewKeyBody,
    actor: str,
) -> dict[str, Any]:
    """Create a key and return it as JSON, with its secret.

    tenant: owner of the key; None for an admin's key.
    scopes: names of the scopes, which decide the routes that the key may call.
    wanted: limits, name and expiry of the key.
    actor: id of the admin's key that creates it.
    """
    record, secret = catalog.create_key(
        tenant, [Scope(scope) for scope in scopes], actor=actor, **wanted.given()
    )
    return {**key_json(record), "key": secret}
