"""GET /metrics: metrics of the whole service, at every gateway."""

import asyncio
import time

from fastapi import APIRouter, Depends, Response

from lorikeet.gateway.auth import RequestAuthenticator
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.services import Services
from lorikeet.metrics.exposition import CONTENT_TYPE, join, render
from lorikeet.request_log.request_log import RequestLog

FRESH_S = 1.0
"""Seconds for which one collected metrics page answers all requests."""
_QUESTION = "metrics"


def add_gauges(
    services: Services, request_log: RequestLog, catalog_view: GatewayCatalogView
) -> None:
    """Add to the gateway's metrics all base models, and gauges of the requests in flight, the
    request log's memory, and the catalog view's last entry and age.
    """
    metrics = services.metrics
    metrics.add_base_models(services.base_models)
    metrics.add_gauge(
        "lorikeet_requests_in_flight",
        "Requests that this gateway has sent to replicas and that have not ended.",
        lambda: request_log.open,
    )
    metrics.add_gauge(
        "lorikeet_request_log_bytes",
        "Memory in which this gateway keeps the last hour's requests, for `lorikeet why`.",
        lambda: request_log.ended_bytes,
    )
    metrics.add_gauge(
        "lorikeet_catalog_seq",
        "Last entry of the catalog's log that this gateway has read.",
        lambda: catalog_view.state.seq,
    )
    metrics.add_gauge(
        "lorikeet_catalog_age_seconds",
        "Seconds since this gateway last refreshed the catalog from the store.",
        lambda: catalog_view.age_s,
    )


class Scrape:
    """Metrics page of all processes of the service, collected by one gateway.

    Also answers when another gateway asks for this gateway's own part of its page.
    Processes that do not answer in time are left out. For use in one event loop.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._made: asyncio.Task[bytes] | None = None
        self._good_until_s = 0.0
        services.peers.register(_QUESTION, self._own_part)

    async def page(self) -> bytes:
        """Return a metrics page at most FRESH_S seconds old. Concurrent requests share one page."""
        made = self._made
        if made is None or (made.done() and time.monotonic() >= self._good_until_s):
            made = self._made = asyncio.create_task(self._make())
        return await asyncio.shield(made)

    async def _make(self) -> bytes:
        services = self._services
        gateways, others = await asyncio.gather(
            services.peers.ask(_QUESTION), services.metrics_pages()
        )
        page = await asyncio.to_thread(join, [*gateways.answers, *others])
        self._good_until_s = time.monotonic() + FRESH_S
        return page

    async def _own_part(self) -> bytes:
        return await asyncio.to_thread(self._render)

    def _render(self) -> bytes:
        return render(self._services.metrics.collect(), {"gateway": self._services.name})


def metrics_routes(authenticator: RequestAuthenticator, scrape: Scrape) -> APIRouter:
    """Return the route GET /metrics, which needs an admin's key, since it shows all tenants.

    A read-only key suffices.
    """
    router = APIRouter(dependencies=[Depends(authenticator.admin)])

    @router.get("/metrics")
    async def metrics() -> Response:
        # Prometheus would keep its connection, and scrape a gateway of a cluster that was replaced.
        headers = {"connection": "close"}
        return Response(await scrape.page(), media_type=CONTENT_TYPE, headers=headers)

    return router
