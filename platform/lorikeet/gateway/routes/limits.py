"""GET /v1/limits: limits of the caller's tenant and key, and how much of them is used."""

from typing import Any

from fastapi import APIRouter, Request

from lorikeet.catalog.records import TenantRecord
from lorikeet.catalog.rules.quota import QuotaUsage, quota_usage
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.reads import TenantReads
from lorikeet.tenancy.rate_limiter import LimitUse, RateLimiter


def limit_routes(
    reads: TenantReads, rate_limiter: RateLimiter, catalog_view: GatewayCatalogView
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
        uses["tenant"] += _of_adapters(tenant, quota)
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
