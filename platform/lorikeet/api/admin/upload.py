"""Admin route: a new version of an adapter, validated before anything is stored."""

import asyncio
import tempfile
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from lorikeet.api.admin.documents import version_json
from lorikeet.api.body import limited
from lorikeet.api.errors import CREATED, OK
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.gate import Actor
from lorikeet.api.intake import check_served, examine
from lorikeet.api.services import Services
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import BlobFacts

_WRITE_BYTES = 4 * 2**20
_WORKERS = 4


def upload_routes(services: Services, follower: CatalogFollower) -> APIRouter:
    """PUT of an adapter's blob.

    A few threads of its own do what blocks: many uploads at once make each other wait, and not
    the follower, through which keys are revoked.
    """
    router = APIRouter(prefix="/adapters")
    workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="upload")

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
        (await follower.refreshed()).tenant(tenant)  # before a long upload
        if base_model:
            check_served(base_model, services.base_models)
        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory(prefix="lorikeet-upload-") as folder:
            blob = Path(folder) / "adapter.safetensors"
            await _receive(request, blob, services.limits.max_bytes, workers)
            facts = await loop.run_in_executor(
                workers,
                examine,
                blob,
                services.base_models,
                services.limits,
                base_model,
                services.adapter_memory,
            )
            known = _is_version(services.catalog, tenant, name, facts)
            take = partial(services.catalog.register, shared=shared, promote=promote, actor=actor)
            version = await loop.run_in_executor(workers, take, tenant, name, blob, facts)
        response.status_code = OK if known else CREATED
        return version_json(services.catalog.state.adapter(tenant, name), version)

    return router


async def _receive(request: Request, path: Path, max_bytes: int, workers: Executor) -> None:
    """Write the body to a file, off the event loop. Raises RequestTooLarge."""
    loop = asyncio.get_running_loop()
    with path.open("wb") as file:
        held: list[bytes] = []
        held_bytes = 0
        async for part in limited(request, max_bytes):
            held.append(part)
            held_bytes += len(part)
            if held_bytes >= _WRITE_BYTES:
                await loop.run_in_executor(workers, file.writelines, held)
                held, held_bytes = [], 0
        await loop.run_in_executor(workers, file.writelines, held)


def _is_version(catalog: AdapterCatalog, tenant: str, name: str, facts: BlobFacts) -> bool:
    record = catalog.state.adapter_records.get(tenant, {}).get(name)
    return record is not None and record.with_digest(facts.digest) is not None
