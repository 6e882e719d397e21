"""GET /v1/models: the models that a tenant may use, in the shape of its client's API."""

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from lorikeet.apis.errors import ClientApi
from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.records import AdapterRecord
from lorikeet.gateway.auth import Caller, RequestAuthenticator
from lorikeet.gateway.error_responses import client_api
from lorikeet.gateway.reads import TenantReads
from lorikeet.gateway.services import Services
from lorikeet_engine.adapter import AdapterRef

_OWNER = "lorikeet"
_ADAPTERS_OF_READ = 200
"""Number of listed adapters that cost one read. These reads count, in addition to one for the
request, in the tenant's limit of reads.
"""


def model_routes(
    services: Services, authenticator: RequestAuthenticator, reads: TenantReads
) -> APIRouter:
    """Return the routes that list a tenant's models and show one of them.

    reads: check of each request's key and of its tenant's limit on reads.
    """
    router = APIRouter(prefix="/v1/models")

    def context_of(base_model: str, caller: Caller) -> int | None:
        known = services.engines.max_context(base_model), caller.max_context
        return min((tokens for tokens in known if tokens is not None), default=None)

    @router.get("")
    async def list_models(request: Request) -> Response:
        def text(caller: Caller, adapters: Sequence[AdapterRecord]) -> bytes:
            tenant = caller.tenant.name
            # the tenant's own first and base models last, as some clients take the first model
            ordered = sorted(adapters, key=lambda record: record.tenant != tenant)
            entries = [entry for record in ordered for entry in _adapter_entries(record)]
            if not caller.key.adapters:
                entries += map(_base_entry, services.base_models)
            lengths = {name: context_of(name, caller) for name in services.base_models}
            for entry in entries:
                entry["max_model_len"] = lengths.get(entry["parent"] or entry["id"])
            return json.dumps(_list(entries, client_api(request.scope))).encode()

        async with reads.admitted(request) as caller:
            tenant = caller.tenant.name
            adapters = await authenticator.visible_adapters(caller)
            reads.limiter.count(tenant, len(adapters) / _ADAPTERS_OF_READ)
            listed = await asyncio.to_thread(text, caller, adapters)  # 10,000 take 0.1 s
        return Response(listed, media_type="application/json")

    @router.get("/{model:path}")
    async def get_model(request: Request, model: str) -> dict[str, Any]:
        async with reads.admitted(request) as caller:
            found = await authenticator.resolve_model(model, caller)
        entry = _base_entry(model)
        if isinstance(ref := found.adapter, AdapterRef):
            entry = _entry(model, ref.tenant, found.created, found.base_model)
        entry["max_model_len"] = context_of(found.base_model, caller)
        if defaults := services.base_models[found.base_model].sampling_of(found.defaults):
            entry["sampling_defaults"] = defaults
        is_anthropics = client_api(request.scope) is ClientApi.ANTHROPIC
        return _anthropics_entry(entry) if is_anthropics else entry

    return router


def _list(entries: list[dict[str, Any]], api: ClientApi) -> dict[str, Any]:
    """Return model entries as a list of a single page, in the shape of the client's API."""
    if api is ClientApi.OPENAI:
        return {"object": "list", "data": entries}
    models = [_anthropics_entry(entry) for entry in entries]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {}
    return {"data": models, "has_more": False, "first_id": None, "last_id": None} | ends


def _anthropics_entry(entry: dict[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(entry["created"], UTC).isoformat().replace("+00:00", "Z")
    named = {"type": "model", "id": entry["id"], "display_name": entry["id"]}
    length = entry["max_model_len"]
    lengths = {"max_input_tokens": length, "max_tokens": length}
    return named | {"created_at": created, "lifecycle": "active"} | lengths


def _adapter_entries(record: AdapterRecord) -> list[dict[str, Any]]:
    """Return a list entry for each alias of an adapter, under the name that requests use."""
    return [
        _entry(
            record.label if alias == DEFAULT_ALIAS else f"{record.label}@{alias}",
            record.tenant,
            record.versions[number - 1].created,
            record.versions[number - 1].base_model,
        )
        for alias, number in sorted(record.aliases.items())
    ]


def _entry(model: str, owner: str, created: float, parent: str) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": int(created),
        "owned_by": owner,
        "parent": parent,
    }


def _base_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": _OWNER, "parent": None}
