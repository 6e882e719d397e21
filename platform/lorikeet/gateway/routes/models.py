"""GET /v1/models: what a tenant may ask for, and nothing else."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.records import AdapterRecord, VersionRecord
from lorikeet.catalog.state import CatalogState
from lorikeet.gateway.auth import RequestAuthenticator
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.services import Services
from lorikeet_engine.adapter import AdapterRef

_OWNER = "lorikeet"


def model_routes(
    services: Services, authenticator: RequestAuthenticator, catalog_view: GatewayCatalogView
) -> APIRouter:
    """Routes of the list of models and of one model."""
    router = APIRouter(prefix="/v1/models")

    @router.get("")
    async def list_models(request: Request) -> dict[str, Any]:
        tenant = await authenticator.tenant(request)
        entries = [_base_entry(name) for name in services.base_models]
        for record in await catalog_view.ask(lambda state: state.visible_to(tenant.name)):
            entries += _adapter_entries(record)
        return {"object": "list", "data": entries}

    @router.get("/{model:path}")
    async def get_model(request: Request, model: str) -> dict[str, Any]:
        tenant = await authenticator.tenant(request)
        ref = (await authenticator.resolve(model, tenant.name)).adapter
        if ref is None:
            return _base_entry(model)
        return _entry(model, ref.tenant, await catalog_view.ask(partial(_version, ref)))

    return router


def _adapter_entries(record: AdapterRecord) -> list[dict[str, Any]]:
    """Return an entry for each alias, under the name that a request would use."""
    return [
        _entry(
            record.label if alias == DEFAULT_ALIAS else f"{record.label}@{alias}",
            record.tenant,
            record.versions[number - 1],
        )
        for alias, number in sorted(record.aliases.items())
    ]


def _version(ref: AdapterRef, state: CatalogState) -> VersionRecord:
    version = state.adapter(ref.tenant, ref.name).version(ref.version)
    assert version is not None
    return version


def _entry(model: str, owner: str, version: VersionRecord) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": int(version.created),
        "owned_by": owner,
        "parent": version.base_model,
    }


def _base_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": _OWNER, "parent": None}
