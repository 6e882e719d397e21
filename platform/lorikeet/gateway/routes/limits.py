"""GET /v1/limits: limits of the caller's tenant and key, and how much of them is used."""

import time
from typing import Any

from fastapi import APIRouter, Request

from lorikeet.batch_store import BatchStore
from lorikeet.catalog.records import TenantRecord
from lorikeet.catalog.rules.quota import QuotaUsage, quota_usage
from lorikeet.errors import StoreError
from lorikeet.file_store import FileStore
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.reads import TenantReads
from lorikeet.gateway.routes.files import StoredFiles
from lorikeet.tenancy.rate_limiter import LimitUse, RateLimiter

_FRESH_S = 10.0
"""Seconds for which the use of files and batches is not read again: /ui asks every two."""
_Used = tuple[int, int, int] | tuple[None, None, None]
"""Bytes of a tenant's files, number of them, and open batches; None: the store failed."""


class FilesUse:
    """Limits on tenants' files and batches, with their use. For use in one event loop.

    batches: store of batches; None: files and batches are off.
    """

    def __init__(self, files: StoredFiles, batches: BatchStore | None) -> None:
        self._files, self._batches = files, batches
        self._read = dict[str, tuple[float, _Used]]()  # by tenant, with the time of reading

    async def limits(self, tenant: TenantRecord) -> list[LimitUse]:
        """Return a tenant's limits, without their use if the store fails."""
        batches = self._batches
        if batches is None:
            return []

        def look(files: FileStore) -> list[LimitUse]:
            quota = files.quota(tenant)
            most = quota.bytes, quota.files, batches.max_open(tenant)
            return list(map(LimitUse, names, most, self._used(tenant.name, files, batches)))

        names = "files_bytes", "max_files", "open_batches"
        lines = tenant.batch_lines
        of_lines = [] if lines is None else [LimitUse("batch_lines", lines)]
        return await self._files.call(look) + of_lines

    def _used(self, tenant: str, files: FileStore, batches: BatchStore) -> _Used:
        read_s, used = self._read.get(tenant, (-_FRESH_S, (None, None, None)))
        if (now_s := time.monotonic()) - read_s >= _FRESH_S:
            try:
                used = *files.used(tenant), len(batches.open_batches(tenant))
            except StoreError:
                used = None, None, None
            self._read[tenant] = now_s, used
        return used


def limit_routes(
    reads: TenantReads,
    rate_limiter: RateLimiter,
    catalog_view: GatewayCatalogView,
    files_use: FilesUse,
) -> APIRouter:
    """Return the route that shows a tenant's limits.

    reads: check of each request's key and of its tenant's limit on reads.
    """
    router = APIRouter(prefix="/v1")

    @router.get("/limits")
    async def limits(request: Request) -> dict[str, Any]:
        async with reads.admitted(request) as caller:
            tenant, key = caller
            quota = await catalog_view.ask_in_thread(lambda state: quota_usage(state, tenant.name))
        uses = rate_limiter.uses(tenant, key)
        uses["tenant"] += _of_adapters(tenant, quota) + await files_use.limits(tenant)
        return {
            "tenant": tenant.name,
            "key_id": key.id,
            "key_name": key.name,
            "scopes": sorted(scope.value for scope in key.scopes),
            "adapters": list(key.adapters) or None,
            "data": [{"of": owner, **use._asdict()} for owner in uses for use in uses[owner]],
        }

    return router


def _of_adapters(tenant: TenantRecord, quota: QuotaUsage) -> list[LimitUse]:
    """Return a tenant's limits on its adapters, with the use of those on their number and bytes."""
    limits = (
        ("max_adapters", tenant.max_adapters, quota.adapters),
        ("max_total_bytes", tenant.max_total_bytes, quota.total_bytes),
        ("pin_budget_bytes", tenant.pin_budget_bytes, None),
        ("max_rank", tenant.max_rank, None),
        ("max_adapter_bytes", tenant.max_adapter_bytes, None),
    )
    return [LimitUse(name, most, used) for name, most, used in limits if most is not None]
