"""GET /metrics: what the whole service measures, whichever gateway is asked."""

import asyncio
import time

from fastapi import APIRouter, Depends, Response

from lorikeet.gateway.auth import RequestAuthenticator
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.services import Services
from lorikeet.metrics.exposition import CONTENT_TYPE, join, render
from lorikeet.request_log.request_log import RequestLog

FRESH_S = 1.0
"""How long a page is good: all who ask meanwhile get it."""
_QUESTION = "metrics"


def add_gauges(
    services: Services, request_log: RequestLog, catalog_view: GatewayCatalogView
) -> None:
    """Begin with all base models, and add what is not counted but read."""
    metrics = services.metrics
    metrics.add_base_models(services.base_models)
    metrics.add_gauge(
        "lorikeet_requests_in_flight",
        "Requests that this gateway has sent on and that are not over.",
        lambda: request_log.open,
    )
    metrics.add_gauge(
        "lorikeet_request_log_bytes",
        "Memory in which this gateway keeps the last hour's requests, for `lorikeet why`.",
        lambda: request_log.ended_bytes,
    )
    metrics.add_gauge(
        "lorikeet_catalog_seq",
        "The last entry of the catalog's log that this gateway knows.",
        lambda: catalog_view.state.seq,
    )
    metrics.add_gauge(
        "lorikeet_catalog_age_seconds",
        "How long ago the store last told this gateway whether there is anything new.",
        lambda: catalog_view.age_s,
    )


class Scrape:
    """The page of all processes' metrics, made by one gateway. For one event loop.

    Gateways, replicas and a controller that do not answer in time are left out.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._made: asyncio.Task[bytes] | None = None
        self._good_until_s = 0.0
        services.peers.register(_QUESTION, self._own_part)

    async def page(self) -> bytes:
        """Return the page, FRESH_S old at most. All who ask while it is made share it."""
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
    """GET /metrics, for an admin's key, be it a read-only one: the page shows all tenants."""
    router = APIRouter(dependencies=[Depends(authenticator.admin)])

    @router.get("/metrics")
    async def metrics() -> Response:
        # Prometheus would keep the connection, and with it a gateway of a cluster that is replaced.
        headers = {"connection": "close"}
        return Response(await scrape.page(), media_type=CONTENT_TYPE, headers=headers)

    return router
