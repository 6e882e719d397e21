"""Admin route: what every replica holds and does."""

from collections import Counter
from typing import Any

from fastapi import APIRouter

from lorikeet.api.admin.documents import replica_json
from lorikeet.api.admin.pins import survey_pins
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.services import EngineClient


def status_routes(engines: EngineClient, follower: CatalogFollower) -> APIRouter:
    """GET /status."""
    router = APIRouter()

    @router.get("/status")
    async def status() -> dict[str, Any]:
        reports = sorted(await engines.reports(), key=lambda report: report.replica)
        pins = await survey_pins(reports, follower)
        return {
            "catalog_seq": follower.state.seq,
            "pins": Counter(found.standing.value for found in pins),
            "replicas": [replica_json(report) for report in reports],
        }

    return router
