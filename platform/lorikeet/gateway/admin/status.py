"""Admin route GET /status: adapters and load of every replica."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter

from lorikeet.errors import StoreError
from lorikeet.gateway.admin.pin_report import PinReporter
from lorikeet.gateway.admin.serializers import replica_json
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.services import EngineClient
from lorikeet.protocol.replica_report import ReplicaReport

_LONGEST_WAIT_S = 3.0


def status_routes(
    engines: EngineClient, catalog_view: GatewayCatalogView, pin_reporter: PinReporter
) -> APIRouter:
    """Return the route GET /status."""
    router = APIRouter()

    @router.get("/status")
    async def status() -> dict[str, Any]:
        reports = sorted(await engines.reports(), key=lambda report: report.replica)
        return {
            "catalog_seq": catalog_view.state.seq,
            "catalog_age_s": round(catalog_view.age_s, 1),
            "pins": await _count_pins(reports, pin_reporter),
            "replicas": [replica_json(report) for report in reports],
        }

    return router


async def _count_pins(
    reports: Sequence[ReplicaReport], pin_reporter: PinReporter
) -> Mapping[str, int] | None:
    """Return the number of pins in each state; None while the catalog does not answer."""
    try:
        async with asyncio.timeout(_LONGEST_WAIT_S):
            return Counter(found.state.value for found in await pin_reporter.pin_statuses(reports))
    except (StoreError, TimeoutError):
        return None
