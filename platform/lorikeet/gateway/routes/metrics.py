"""GET /metrics: what the whole service measures, whichever gateway is asked."""

import asyncio
import time

from fastapi import APIRouter, Depends, Response

from lorikeet.gateway.authentication import RequestAuthenticator
from lorikeet.gateway.catalog_follower import CatalogFollower
from lorikeet.gateway.services import Services
from lorikeet.metrics.families import residency_label
from lorikeet.metrics.gateway import GatewayMetrics, RequestSummary
from lorikeet.metrics.page import CONTENT_TYPE, join, render
from lorikeet.request_log.explanations import Explanations, Listener
from lorikeet.request_log.record import RequestRecord

KEPT_S = 1.0
"""For so long a page is good: who asks meanwhile gets the same."""
_QUESTION = "metrics"


def counting(metrics: GatewayMetrics) -> Listener:
    """Counts each request that is over."""

    def ended(record: RequestRecord) -> None:
        metrics.ended(summary(record))

    return ended


def summary(record: RequestRecord) -> RequestSummary:
    """What is counted of a request that is over."""
    slowest, outcome, adapter = record.slowest, record.outcome, record.adapter
    finished = record.usage is not None and record.code is None
    return RequestSummary(
        outcome="left" if outcome == "client left" else outcome,
        tenant=record.tenant or "",
        base_model=record.base_model or "",
        adapter=f"{adapter.tenant}/{adapter.name}" if adapter else None,
        residency=_residency(record),
        code=record.code,
        first_token_s=record.first_token_s,
        queue_s=max(0.0, slowest.queued_s - slowest.load_s) if slowest else None,
        total_s=record.until_s if finished else None,
        retries=record.retries,
        tokens=record.tokens,
    )


def show(services: Services, explanations: Explanations, follower: CatalogFollower) -> None:
    """Begin with all base models, and add what is not counted but looked at."""
    metrics = services.metrics
    metrics.serves(services.base_models)
    metrics.shows(
        "lorikeet_open_requests",
        "Requests that this gateway has sent on and that are not over.",
        lambda: explanations.open,
    )
    metrics.shows(
        "lorikeet_catalog_seq",
        "The last entry of the catalog's log that this gateway knows.",
        lambda: follower.state.seq,
    )
    metrics.shows(
        "lorikeet_catalog_age_seconds",
        "How long ago the store last told this gateway whether there is anything new.",
        lambda: follower.age_s,
    )


class Scrape:
    """One gateway's way to a page of everything. For one event loop.

    Gateways, replicas and a controller that do not answer in time are left out.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._made: asyncio.Task[bytes] | None = None
        self._good_until_s = 0.0
        services.peers.answers(_QUESTION, self._own)

    async def page(self) -> bytes:
        """As it was a second ago at most. All who ask while it is made share it."""
        made = self._made
        if made is None or (made.done() and time.monotonic() >= self._good_until_s):
            made = self._made = asyncio.create_task(self._make())
        return await asyncio.shield(made)

    async def _make(self) -> bytes:
        services = self._services
        gateways, others = await asyncio.gather(services.peers.ask(_QUESTION), services.pages())
        page = await asyncio.to_thread(join, [*gateways.answers, *others])
        self._good_until_s = time.monotonic() + KEPT_S
        return page

    async def _own(self) -> bytes:
        return await asyncio.to_thread(self._render)

    def _render(self) -> bytes:
        return render(self._services.metrics.collect(), {"gateway": self._services.name})


def metrics_routes(gate: RequestAuthenticator, scrape: Scrape) -> APIRouter:
    """For who has an admin's key, be it a read-only one: it tells of all tenants."""
    router = APIRouter(dependencies=[Depends(gate.admin)])

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(await scrape.page(), media_type=CONTENT_TYPE)

    return router


def _residency(record: RequestRecord) -> str | None:
    if record.replica is None:
        return None
    return residency_label(record.residency)
