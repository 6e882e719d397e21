"""Admin routes that list, promote, roll back and retire adapters."""

from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from lorikeet.apis.body import Body
from lorikeet.catalog.names import DEFAULT_ALIAS, check_name
from lorikeet.catalog.state import CatalogState
from lorikeet.gateway.admin.history import Moment
from lorikeet.gateway.admin.serializers import (
    Json,
    adapter_json,
    described_version_json,
    list_response,
    version_json,
)
from lorikeet.gateway.auth import Actor
from lorikeet.gateway.body import json_body
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.services import ServedModel, Services

MOST_LISTED = 1000
"""Maximum number of adapters in one response."""

Version = Annotated[int, Field(ge=1)]


class Promote(Body):
    """Request to point an alias to a version, or to send that version a part of the alias's
    requests.

    expect: version that the alias must point to now; else the request is refused. None: any.
    share: fraction of the alias's requests that go to the version; None: all.
    """

    version: Version
    alias: str = DEFAULT_ALIAS
    expect: Version | None = None
    share: Annotated[float, Field(gt=0, lt=1)] | None = None


class Rollback(Body):
    """Request to end an alias's traffic share or, if it has none, to point the alias back to the
    usable version that it pointed to before.
    """

    alias: str = DEFAULT_ALIAS


class Retire(Body):
    """Request to retire one version, or the whole adapter if version is None.

    Requests can no longer use a retired version. Its blob is not deleted.
    """

    version: Version | None = None


PromoteBody = Annotated[Promote, json_body(Promote)]
RollbackBody = Annotated[Rollback, json_body(Rollback)]
RetireBody = Annotated[Retire, json_body(Retire)]


def adapter_routes(services: Services, catalog_view: GatewayCatalogView) -> APIRouter:
    """Return the routes that list, show, promote, roll back and retire adapters."""
    endpoints = AdapterEndpoints(services, catalog_view)
    router = APIRouter(prefix="/adapters")
    router.add_api_route("", endpoints.list, response_model=None)
    router.add_api_route("/{tenant}/{name}", endpoints.show)
    for operation in (endpoints.promote, endpoints.rollback, endpoints.retire):
        path = f"/{{tenant}}/{{name}}/{operation.__name__}"
        router.add_api_route(path, operation, methods=["POST"])
    return router


class AdapterEndpoints:
    """Endpoints that list, show, promote, roll back and retire adapters."""

    def __init__(self, services: Services, catalog_view: GatewayCatalogView) -> None:
        self._catalog, self._base_models = services.catalog, services.base_models
        self._catalog_view = catalog_view

    async def list(
        self,
        as_of: Moment,
        tenant: str | None = None,
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = MOST_LISTED,
    ) -> Response:
        """Return one page of the list of adapters, a JSON object with `data` and `next`.

        as_of: moment in the catalog's history that is listed.
        tenant: owner of the adapters to list; None: all tenants' adapters.
        after: `next` of the previous page: tenant/name of its last adapter; "" for the first page.
            In the last page `next` is null.
        limit: maximum number of adapters in the page.
        """
        page = partial(_page, tenant, after, limit)
        return await as_of.ask_in_thread(self._catalog, self._catalog_view, page)

    async def show(self, as_of: Moment, tenant: str, name: str) -> Json:
        """Show an adapter with all its versions.

        as_of: moment in the catalog's history that is shown.
        """
        shown = partial(_shown, tenant, name, self._base_models)
        return await as_of.ask_in_thread(self._catalog, self._catalog_view, shown)

    def promote(self, tenant: str, name: str, wanted: PromoteBody, actor: Actor) -> Json:
        """Point an alias to a version, or send that version a fraction of the alias's requests.

        Return the version.
        """
        version, alias, expect = wanted.version, wanted.alias, wanted.expect
        if wanted.share is None:
            record = self._catalog.promote(tenant, name, version, alias, expect, actor=actor)
        else:
            record = self._catalog.give_share(
                tenant, name, version, wanted.share, alias, expect, actor=actor
            )
        return version_json(record, record.versions[version - 1])

    def rollback(self, tenant: str, name: str, wanted: RollbackBody, actor: Actor) -> Json:
        """End an alias's traffic share or, without one, point it back to its previous version.

        Return the version that the alias now points to.
        """
        record = self._catalog.rollback(tenant, name, wanted.alias, actor=actor)
        return version_json(record, record.versions[record.aliases[wanted.alias] - 1])

    def retire(self, tenant: str, name: str, wanted: RetireBody, actor: Actor) -> Json:
        """Retire one version, or the whole adapter: requests can no longer use it."""
        return adapter_json(self._catalog.retire(tenant, name, wanted.version, actor=actor))


def _page(tenant: str | None, after: str, limit: int, state: CatalogState) -> Response:
    if tenant is not None:
        state.tenant(check_name(tenant, "tenant"))
    owner, _, name = after.partition("/")
    page = list(islice(state.adapters(tenant, (owner, name)), limit))
    further = page[-1].label if len(page) == limit else None
    return list_response(map(adapter_json, page), next=further)


def _shown(
    tenant: str, name: str, base_models: Mapping[str, ServedModel], state: CatalogState
) -> Json:
    adapter = state.adapter(tenant, name)
    versions = [described_version_json(adapter, each, base_models) for each in adapter.versions]
    return adapter_json(adapter) | {"versions": versions}
