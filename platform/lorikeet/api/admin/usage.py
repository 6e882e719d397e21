"""Admin route: what tenants used."""

from datetime import date
from typing import Any

from fastapi import APIRouter

from lorikeet.api.usage import First, UsageReports, parse_by
from lorikeet.catalog.names import check_name
from lorikeet.usage.summary import By


def admin_usage_routes(reports: UsageReports) -> APIRouter:
    """GET /usage."""
    router = APIRouter()

    @router.get("/usage")
    async def usage(
        first: First = None,
        to: date | None = None,
        by: str = f"{By.TENANT},{By.ADAPTER}",
        tenant: str | None = None,
    ) -> dict[str, Any]:
        if tenant is not None:
            check_name(tenant, "tenant")
        return await reports.report(first, to, parse_by(by, tuple(By)), tenant)

    return router
