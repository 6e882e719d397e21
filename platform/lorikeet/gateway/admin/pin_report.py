"""How pins stand and what one more would move, by the plan that the controller makes."""

import asyncio
import time
from collections.abc import Sequence
from typing import Unpack

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import PinKey
from lorikeet.catalog.rules.pin_terms import PinTerms
from lorikeet.catalog.state import CatalogState
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.services import EngineClient
from lorikeet.placement.moves import Moves, moves_of
from lorikeet.placement.pin_status import PinStatus, standings
from lorikeet.placement.resolved_pins import PinResolver
from lorikeet.protocol.replica_report import ReplicaReport


class PinReporter:
    """Asks the catalog and the replicas; the work is done in threads."""

    def __init__(
        self, catalog: AdapterCatalog, engines: EngineClient, catalog_view: GatewayCatalogView
    ) -> None:
        self._catalog = catalog
        self._engines = engines
        self._catalog_view = catalog_view
        self._reader = PinResolver()

    async def standings(self, reports: Sequence[ReplicaReport] | None = None) -> list[PinStatus]:
        """Every pin in force, and how it stands on the replicas that answer.

        reports: their answers, if they were asked already. Raises StoreError.
        """
        heard = await self._engines.reports() if reports is None else reports
        now = time.time()
        return await self._catalog_view.ask_in_thread(
            lambda state: list(standings(self._reader.read(state, now), heard))
        )

    async def moves(self, tenant: str, name: str | None, **terms: Unpack[PinTerms]) -> Moves:
        """What such a pin would move, which is not made. Raises what AdapterCatalog.pin raises."""
        reports, now = await self._engines.reports(), time.time()

        def compare(before: CatalogState, after: CatalogState) -> Moves:
            promises = self._reader.read(before, now), self._reader.read(after, now)
            return moves_of(PinKey(tenant, name), *promises, reports)

        return await asyncio.to_thread(
            lambda: self._catalog.if_pinned(tenant, name, compare, **terms)
        )
