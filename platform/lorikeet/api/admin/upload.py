"""Admin route: a new version of an adapter, validated before anything is stored."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from lorikeet.api.admin.documents import version_json
from lorikeet.api.body import limited
from lorikeet.api.errors import CREATED, OK
from lorikeet.api.gate import Actor
from lorikeet.api.intake import examine
from lorikeet.api.services import Services
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import BlobFacts

_WRITE_BYTES = 4 * 2**20


def upload_routes(services: Services) -> APIRouter:
    """PUT of an adapter's blob."""
    router = APIRouter(prefix="/adapters")

    @router.put("/{tenant}/{name}/versions")
    async def register(
        request: Request,
        response: Response,
        tenant: str,
        name: str,
        actor: Actor,
        promote: bool = False,
        shared: bool | None = None,
        base_model: str | None = None,
    ) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="lorikeet-upload-") as folder:
            blob = Path(folder) / "adapter.safetensors"
            await _receive(request, blob, services.limits.max_bytes)
            facts = await asyncio.to_thread(
                examine, blob, services.base_models, services.limits, base_model
            )
            known = _is_version(services.catalog, tenant, name, facts)
            version = await asyncio.to_thread(
                services.catalog.register,
                tenant,
                name,
                blob,
                facts,
                shared=shared,
                promote=promote,
                actor=actor,
            )
        response.status_code = OK if known else CREATED
        return version_json(services.catalog.state.adapter(tenant, name), version)

    return router


async def _receive(request: Request, path: Path, max_bytes: int) -> None:
    """Write the body to a file, off the event loop. Raises RequestTooLarge."""
    with path.open("wb") as file:
        held: list[bytes] = []
        held_bytes = 0
        async for part in limited(request, max_bytes):
            held.append(part)
            held_bytes += len(part)
            if held_bytes >= _WRITE_BYTES:
                await asyncio.to_thread(file.writelines, held)
                held, held_bytes = [], 0
        await asyncio.to_thread(file.writelines, held)


def _is_version(catalog: AdapterCatalog, tenant: str, name: str, facts: BlobFacts) -> bool:
    record = catalog.state.adapter_records.get(tenant, {}).get(name)
    return record is not None and record.with_digest(facts.digest) is not None
