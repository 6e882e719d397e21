"""Metering of a replica's GPU slots and adapter loads by tenant, written to the store."""

from concurrent.futures import Future
from contextlib import suppress

from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.usage.ledger import UsageAccount, UsageCounts, UsageLedger
from lorikeet.usage.writer import UsageWriter
from lorikeet_engine.errors import EngineError
from lorikeet_engine.process.client import EngineProcessClient
from lorikeet_engine.telemetry.status import SlotUse

_COLLECT_S = 5.0
_LAST_FLUSH_S = 10.0


class SlotMetering:
    """Ledger of the seconds for which tenants' adapters held GPU slots, and of adapter loads.

    A thread writes it to the store every `interval_s`. Gateways count requests and tokens.
    """

    def __init__(
        self, store: ObjectStore, engine: EngineProcessClient, base_model: str, interval_s: float
    ) -> None:
        self._engine, self._base_model = engine, base_model
        self._ledger = UsageLedger()
        self._writer = UsageWriter(store, self._ledger, interval_s, self._collect)
        self._writer.start()

    def close(self) -> None:
        """Write all usage to the store and stop the thread. The engine must still be running."""
        self._writer.close(_LAST_FLUSH_S)

    def _collect(self) -> None:
        """Add to the ledger the slot time and loads that the engine's process has counted since the
        last call.
        """
        asked = self._engine.take_use()
        asked.add_done_callback(self._add)  # even if late: the engine reports each use once
        with suppress(EngineError, TimeoutError):
            asked.result(_COLLECT_S)

    def _add(self, answered: Future[list[SlotUse]]) -> None:
        if answered.exception() is None:
            for use in answered.result():
                if use.tenant:  # an admin's smoke test has no tenant
                    counts = UsageCounts(
                        slot_s=use.leased_s, loads=use.loads, load_bytes=use.load_bytes
                    )
                    account = UsageAccount.of(use.tenant, self._base_model, use.ref)
                    self._ledger.add(account, counts)
