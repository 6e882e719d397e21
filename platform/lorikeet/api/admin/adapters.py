"""Admin routes: list, promote, roll back, retire adapters."""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from lorikeet.api.admin.documents import adapter_json, version_json
from lorikeet.api.admin.history import Moment
from lorikeet.api.body import Body, json_body
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.gate import Actor
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.names import DEFAULT_ALIAS, check_name
from lorikeet.catalog.records import AdapterRecord
from lorikeet.catalog.state import CatalogState

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


def adapter_routes(catalog: AdapterCatalog, follower: CatalogFollower) -> APIRouter:
    """Everything but the upload of a version."""
    router = APIRouter(prefix="/adapters")

    @router.get("")
    async def list_adapters(as_of: Moment, tenant: str | None = None) -> dict[str, Any]:
        def listed(state: CatalogState) -> list[dict[str, Any]]:
            if tenant is not None:
                state.tenant(check_name(tenant, "tenant"))
            return list(map(adapter_json, state.adapters(tenant)))

        return {"data": await as_of.survey(catalog, follower, listed)}

    @router.get("/{tenant}/{name}")
    async def show(as_of: Moment, tenant: str, name: str) -> dict[str, Any]:
        def shown(state: CatalogState) -> dict[str, Any]:
            return adapter_json(state.adapter(tenant, name))

        return await as_of.survey(catalog, follower, shown)

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
