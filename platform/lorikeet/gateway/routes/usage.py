"""Usage: GET /v1/usage for a tenant's own, GET /admin/v1/usage for one tenant's or all."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Annotated, Any
from weakref import WeakValueDictionary

from fastapi import APIRouter, Query, Request

from lorikeet.catalog.names import check_name
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import InvalidInput
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.reads import TenantReads
from lorikeet.usage.ledger import day_of
from lorikeet.usage.reader import MOST_DAYS, UsageReader
from lorikeet.usage.summary import GroupBy, rows

First = Annotated[date | None, Query(alias="from")]
_AT_ONCE = 2
_DAYS_OF_READ = 2
"""Number of days in a report that cost one read. These reads count, in addition to one for the
request, in the tenant's limit of reads.
"""

Json = dict[str, Any]


class UsageReports:
    """Reports of usage, read from the store in threads of their own, a few at once.

    For use in one event loop.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._reader = UsageReader(store)
        self._readers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="usage")
        self._turns = WeakValueDictionary[str, asyncio.Lock]()  # by tenant

    async def report(
        self,
        first: date,
        last: date,
        by: Sequence[GroupBy],
        tenant: str | None = None,
    ) -> Json:
        """Return usage rows of a range of days, as JSON.

        first: first day.
        last: last day, included.
        by: columns to group by.
        tenant: tenant to report; None: all.

        Raises InvalidInput for an invalid range; StoreError if the store fails.
        """

        def read() -> list[Json]:
            return rows(self._reader.read(first, last), by, tenant)

        data = await asyncio.get_running_loop().run_in_executor(self._readers, read)
        return {"from": first.isoformat(), "to": last.isoformat(), "data": data}

    async def report_of(self, tenant: str, first: date, last: date, by: Sequence[GroupBy]) -> Json:
        """Return a tenant's usage rows of a range of days, as JSON, once the tenant's earlier
        reports are done.

        first, last: first and last day, both included.
        by: columns to group by.

        Raises InvalidInput for an invalid range; StoreError if the store fails.
        """
        async with self._turns.setdefault(tenant, asyncio.Lock()):
            return await self.report(first, last, by, tenant)


def period(first: date | None, last: date | None) -> tuple[date, date]:
    """Return the first and the last day of a report.

    first: first day; None: first of this month.
    last: last day, included; None: today.
    """
    today = day_of(time.time())
    return first or today.replace(day=1), last or today


def parse_by(text: str, allowed: Sequence[GroupBy]) -> list[GroupBy]:
    """Parse `by`, the columns to group by, e.g. day,adapter. Raises InvalidInput for unknown
    columns.
    """
    try:
        by = [GroupBy(each) for each in text.split(",")]
    except ValueError:
        by = []
    if not by or not set(by) <= set(allowed):
        raise InvalidInput(
            f"by={text[:80]!r}: want some of {', '.join(allowed)}, with commas between", param="by"
        )
    return by


def usage_routes(reads: TenantReads, reports: UsageReports) -> APIRouter:
    """Return the route of a tenant's own usage.

    reads: check of each request's key and of its tenant's limit on reads.
    """
    router = APIRouter(prefix="/v1")

    @router.get("/usage")
    async def usage(
        request: Request, first: First = None, to: date | None = None, by: str = GroupBy.ADAPTER
    ) -> Json:
        first, last = period(first, to)
        days = min(max(0, (last - first).days), MOST_DAYS)
        async with reads.admitted(request, 1 + days / _DAYS_OF_READ) as caller:
            columns = parse_by(by, (GroupBy.DAY, GroupBy.MONTH, GroupBy.ADAPTER))
            return await reports.report_of(caller.tenant.name, first, last, columns)

    return router


def admin_usage_routes(reports: UsageReports, catalog_view: GatewayCatalogView) -> APIRouter:
    """Return the admin route of the usage of one tenant or all."""
    router = APIRouter()

    @router.get("/usage")
    async def usage(
        first: First = None,
        to: date | None = None,
        by: str = f"{GroupBy.TENANT},{GroupBy.ADAPTER}",
        tenant: str | None = None,
    ) -> Json:
        if tenant is not None:
            check_name(tenant, "tenant")
        found = await reports.report(*period(first, to), parse_by(by, tuple(GroupBy)), tenant)
        if tenant is not None and not found["data"]:  # raises UnknownTenant for a misspelt name
            await catalog_view.ask(lambda state: state.tenant(tenant))
        return found

    return router
