"""Status of pins (orders to keep an adapter on disk, in host memory or on the GPU), and dry runs of
new pins.

Statuses and dry runs come from the same plan that the controller computes.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Unpack

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import PinKey
from lorikeet.catalog.rules.pins import PinOptions
from lorikeet.catalog.state import CatalogState
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.services import EngineClient
from lorikeet.placement.pin_dry_run import PinDryRun, dry_run_pin
from lorikeet.placement.pin_status import PinStatus, pin_statuses
from lorikeet.placement.pinned_versions import PinResolver
from lorikeet.protocol.replica_report import ReplicaReport


class PinReporter:
    """Reporter of pins' statuses, and of dry runs: the loads and releases a new pin would cause.

    Both follow from the catalog and the replicas' reports.

    Computes them in threads.
    """

    def __init__(
        self, catalog: AdapterCatalog, engines: EngineClient, catalog_view: GatewayCatalogView
    ) -> None:
        self._catalog = catalog
        self._engines = engines
        self._catalog_view = catalog_view
        self._resolver = PinResolver()

    async def pin_statuses(self, reports: Sequence[ReplicaReport] | None = None) -> list[PinStatus]:
        """Return the status of every pin that has not expired, on the replicas that answer.

        reports: the replicas' reports; None: ask the replicas for reports.

        Raises StoreError if the catalog cannot be read.
        """
        if reports is None:
            reports = await self._engines.reports()
        now = time.time()
        return await self._catalog_view.ask_in_thread(
            lambda state: list(pin_statuses(self._resolver.resolve(state, now), reports))
        )

    async def dry_run(
        self, tenant: str, name: str | None, **options: Unpack[PinOptions]
    ) -> PinDryRun:
        """Return the loads and releases of adapters that a new pin would cause.

        name: adapter to pin; None: all adapters of the tenant.
        options: selector, tier, replicas, priority, reason and expires, as in PinOptions.

        Raises InvalidInput if an option is not allowed, UnknownModel, UnknownTenant, Conflict
        beyond the tenant's pin budget, and StoreError if the catalog cannot be read.
        """
        reports, now = await self._engines.reports(), time.time()

        def compare(before: CatalogState, after: CatalogState) -> PinDryRun:
            resolved = self._resolver.resolve(before, now), self._resolver.resolve(after, now)
            return dry_run_pin(PinKey(tenant, name), *resolved, reports)

        return await asyncio.to_thread(
            lambda: self._catalog.if_pinned(tenant, name, compare, **options)
        )
