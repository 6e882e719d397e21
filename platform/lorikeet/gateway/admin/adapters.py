"""Admin routes: list, promote, roll back, retire adapters."""

from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.names import DEFAULT_ALIAS, check_name
from lorikeet.catalog.records import AdapterRecord
from lorikeet.catalog.state import CatalogState
from lorikeet.gateway.admin.history import Moment
from lorikeet.gateway.admin.serializers import adapter_json, list_answer, version_json
from lorikeet.gateway.auth import Actor
from lorikeet.gateway.body import Body, json_body
from lorikeet.gateway.catalog_view import GatewayCatalogView

MOST_LISTED = 1000
"""Adapters of one answer."""

Version = Annotated[int, Field(ge=1)]


class Promote(Body):
    """Point an alias to a version, or give it a share of the alias's requests.

    expect: the version that the alias must point to until now.
    """

    version: Version
    alias: str = DEFAULT_ALIAS
    expect: Version | None = None
    share: Annotated[float, Field(gt=0, lt=1)] | None = None


class Rollback(Body):
    """Point an alias back to where it pointed before."""

    alias: str = DEFAULT_ALIAS


class Retire(Body):
    """End the use of one version, or of the adapter."""

    version: Version | None = None


PromoteBody = Annotated[Promote, json_body(Promote)]
RollbackBody = Annotated[Rollback, json_body(Rollback)]
RetireBody = Annotated[Retire, json_body(Retire)]


def adapter_routes(catalog: AdapterCatalog, catalog_view: GatewayCatalogView) -> APIRouter:
    """Everything but the upload of a version."""
    router = APIRouter(prefix="/adapters")

    @router.get("", response_model=None)
    async def list_adapters(
        as_of: Moment,
        tenant: str | None = None,
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = MOST_LISTED,
    ) -> Response:
        """`after`, tenant/name, is the `next` of the page before; null is the end."""

        def listed(state: CatalogState) -> Response:
            if tenant is not None:
                state.tenant(check_name(tenant, "tenant"))
            owner, _, name = after.partition("/")
            page = list(islice(state.adapters(tenant, (owner, name)), limit))
            further = page[-1].label if len(page) == limit else None
            return list_answer(map(adapter_json, page), next=further)

        return await as_of.ask_in_thread(catalog, catalog_view, listed)

    @router.get("/{tenant}/{name}")
    async def show(as_of: Moment, tenant: str, name: str) -> dict[str, Any]:
        def shown(state: CatalogState) -> dict[str, Any]:
            return adapter_json(state.adapter(tenant, name))

        return await as_of.ask_in_thread(catalog, catalog_view, shown)

    @router.post("/{tenant}/{name}/promote")
    def promote(tenant: str, name: str, wanted: PromoteBody, actor: Actor) -> dict[str, Any]:
        version, alias, expect = wanted.version, wanted.alias, wanted.expect
        if wanted.share is None:
            record = catalog.promote(tenant, name, version, alias, expect, actor=actor)
        else:
            record = catalog.give_share(
                tenant, name, version, wanted.share, alias, expect, actor=actor
            )
        return version_json(record, record.versions[version - 1])

    @router.post("/{tenant}/{name}/rollback")
    def rollback(tenant: str, name: str, wanted: RollbackBody, actor: Actor) -> dict[str, Any]:
        record = catalog.rollback(tenant, name, wanted.alias, actor=actor)
        return _at_alias(record, wanted.alias)

    @router.post("/{tenant}/{name}/retire")
    def retire(tenant: str, name: str, wanted: RetireBody, actor: Actor) -> dict[str, Any]:
        return adapter_json(catalog.retire(tenant, name, wanted.version, actor=actor))

    return router


def _at_alias(record: AdapterRecord, alias: str) -> dict[str, Any]:
    return version_json(record, record.versions[record.aliases[alias] - 1])
