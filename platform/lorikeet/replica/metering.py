"""Metering of a replica: billed usage of its tenants, written to the store."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace

from lorikeet.answer_stream.billed_tokens import BilledTokens
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.prices import Prices, price_of
from lorikeet.protocol.messages import Call
from lorikeet.usage.ledger import UsageAccount, UsageCounts, UsageLedger
from lorikeet.usage.writer import UsageWriter
from lorikeet_engine.adapter import Adapter
from lorikeet_engine.errors import EngineClosed, EngineError
from lorikeet_engine.process.client import EngineProcessClient
from lorikeet_engine.telemetry.status import SlotUse

_COLLECT_S = 5.0
_LAST_FLUSH_S = 10.0


class Metering:
    """Usage ledger of a replica, and the thread that writes it to the store."""

    def __init__(
        self,
        store: ObjectStore,
        engine: EngineProcessClient,
        base_model: str,
        interval_s: float,
        prices: Prices,
    ) -> None:
        self._prices = prices
        self._engine, self._base_model = engine, base_model
        self._ledger = UsageLedger()
        self._writer = UsageWriter(store, self._ledger, interval_s, self._collect)
        self._writer.start()

    @contextmanager
    def metered(self, call: Call, prompts: Sequence[Sequence[int]]) -> Iterator[BilledTokens]:
        """Yield a meter for a call's tokens; bill the call when the context ends, even by an error.

        prompts: token ids of each prompt.
        """
        meter = BilledTokens(call, prompts)
        try:
            yield meter
        except EngineError as error:
            meter.failed(is_given_up=isinstance(error, EngineClosed))
            raise
        finally:
            self._count(call, meter)

    def close(self) -> None:
        """Write all usage to the store. The engine must still be running."""
        self._writer.close(_LAST_FLUSH_S)

    def _count(self, call: Call, meter: BilledTokens) -> None:
        counts = meter.counts()
        if counts is not None:
            used = counts.prompt_tokens, counts.cached_tokens, counts.output_tokens
            background = call.scheduling.background
            at = price_of(self._prices, self._base_model, call.adapter, background=background)
            account = self._account(call.tenant, call.adapter)
            self._ledger.add(account, replace(counts, cost=at.cost(*used)))

    def _collect(self) -> None:
        """Add to the ledger the slot time and loads that the engine's process has counted."""
        asked = self._engine.take_use()
        asked.add_done_callback(self._add)  # even if late: the engine reports each use once
        with suppress(EngineError, TimeoutError):
            asked.result(_COLLECT_S)

    def _add(self, answered: Future[list[SlotUse]]) -> None:
        if answered.exception() is None:
            for use in answered.result():
                if use.tenant:  # an admin's smoke test has no tenant
                    account = self._account(use.tenant, use.ref)
                    slots = UsageCounts(
                        slot_s=use.leased_s, loads=use.loads, load_bytes=use.load_bytes
                    )
                    self._ledger.add(account, slots)

    def _account(self, tenant: str, adapter: Adapter | None) -> UsageAccount:
        names = [f"{member.tenant}/{member.name}" for member in adapter.members] if adapter else []
        label = "+".join(sorted(names)) or None
        return UsageAccount(tenant, self._base_model, label)
