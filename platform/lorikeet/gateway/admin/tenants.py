"""Admin routes that list, show, create and limit tenants, and list and create their keys."""

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.rules.quota import quota_usage
from lorikeet.catalog.state import CatalogState
from lorikeet.gateway.admin.keys import create_key
from lorikeet.gateway.admin.limit_bodies import NewKeyBody, TenantLimitsBody
from lorikeet.gateway.admin.serializers import key_json, list_response, tenant_json
from lorikeet.gateway.auth import Actor
from lorikeet.gateway.body import json_body
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.error_responses import CREATED


class NewTenant(TenantLimitsBody):
    """Request to create a tenant with limits."""

    tenant: str


class TenantKey(NewKeyBody):
    """Request to create a tenant's key, which can generate or push adapters but not administer.

    adapters: patterns of the adapter names that a publish key may push, or the only ones that
        another key may use.
    """

    scopes: list[Literal["infer", "read-only", "publish"]] = Field(
        [Scope.INFER.value], min_length=1, max_length=1
    )
    adapters: list[str] = Field(default_factory=list)

    def given(self) -> dict[str, Any]:
        """Return the key's limits, name, expiry and `adapters`, but only those that the request
        sets.
        """
        own = {"adapters": tuple(self.adapters)} if self.adapters else {}
        return own | super().given()


def tenant_routes(catalog: AdapterCatalog, catalog_view: GatewayCatalogView) -> APIRouter:
    """Return the routes under /tenants."""
    router = APIRouter(prefix="/tenants")

    @router.get("", response_model=None)
    async def list_tenants() -> Response:
        return await catalog_view.ask_in_thread(
            lambda state: list_response(map(tenant_json, state.tenants()))
        )

    @router.post("", status_code=CREATED)
    def create(wanted: Annotated[NewTenant, json_body(NewTenant)], actor: Actor) -> dict[str, Any]:
        return tenant_json(catalog.create_tenant(wanted.tenant, actor=actor, **wanted.given()))

    @router.get("/{tenant}")
    async def show(tenant: str) -> dict[str, Any]:
        return await catalog_view.ask_in_thread(partial(_shown, tenant))

    @router.patch("/{tenant}")
    def limit(
        tenant: str, wanted: Annotated[TenantLimitsBody, json_body(TenantLimitsBody)], actor: Actor
    ) -> dict[str, Any]:
        return tenant_json(catalog.limit_tenant(tenant, actor=actor, **wanted.given()))

    @router.get("/{tenant}/keys")
    async def list_keys(tenant: str) -> dict[str, Any]:
        keys = await catalog_view.ask_in_thread(lambda state: state.keys(tenant))
        return {"data": list(map(key_json, keys))}

    @router.post("/{tenant}/keys", status_code=CREATED)
    def create_tenant_key(
        tenant: str, wanted: Annotated[TenantKey, json_body(TenantKey)], actor: Actor
    ) -> dict[str, Any]:
        return create_key(catalog, tenant, wanted.scopes, wanted, actor)

    return router


def _shown(tenant: str, state: CatalogState) -> dict[str, Any]:
    """Return a tenant as JSON, with the number and total bytes of its adapters in the catalog."""
    shown = tenant_json(state.tenant(tenant))
    used = quota_usage(state, tenant)
    return shown | {"adapters": used.adapters, "total_bytes": used.total_bytes}
