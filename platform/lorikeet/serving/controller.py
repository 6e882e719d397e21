"""Turns pins and demand into what replicas keep and prefetch; never on a request's path."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.errors import LorikeetError, StoreError
from lorikeet.logs import log_to_stderr
from lorikeet.metrics.controller import controller_metrics
from lorikeet.metrics.exposition import render
from lorikeet.placement.pin_placement import PlacementPlan, place_pins
from lorikeet.placement.pin_status import pin_statuses
from lorikeet.placement.pinned_versions import PinResolver, ResolvedPins
from lorikeet.placement.prefetcher import SURVEY_S
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.serving.replica_reconciler import ReplicaReconciler
from lorikeet.settings import Settings
from lorikeet.usage.compaction import compact_recent_days

log = logging.getLogger(__name__)

TICK_S = 1.0
"""How long a new pin waits at most until its adapters are loaded."""
_SNAPSHOT_PERIOD_S = 10.0
_COMPACTION_PERIOD_S = 3600.0
_HUNG_S = 120.0  # far longer than any part of a tick
_STORE_TIMEOUT_S = 2.0
"""A store that hangs delays a tick by this much: then the last view of the catalog is used."""


class Controller:
    """Reads the catalog and what replicas report, and sends each replica its part of the plan.

    It keeps nothing that a restart would lose for long: a new controller publishes the same plan,
    and learns demand from what replicas have counted. While the store is away it goes on with the
    last view of the catalog, at its start with the one that gateways of its machine have kept;
    without any it sends nothing, and replicas keep their pins.
    """

    def __init__(self, settings: Settings, engines: Mapping[str, DeploymentHandle[Any]]) -> None:
        log_to_stderr()
        store = open_store(settings.catalog)
        self._catalog = CatalogReader(store)
        self._kept_view = KeptView(settings.cache_dir, store.url)
        self._reconcilers = [
            ReplicaReconciler(engine, settings, name) for name, engine in engines.items()
        ]
        self._resolver = PinResolver()
        self._pins = ResolvedPins()
        self._pins_seq: int | None = None
        self._placed_pins: ResolvedPins | None = None
        self._reading: asyncio.Task[None] | None = None
        self._survey_due_s = 0.0
        self._placement: PlacementPlan | None = None
        self._survey_s = 0.0
        self._failure = ""
        self._ticked_s = time.monotonic()
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run())
        self._snapshots = loop.create_task(self._keep_snapshots())
        self._compaction = loop.create_task(self._compact_usage())

    async def metrics(self) -> bytes:
        """The controller's part of the metrics page."""
        return await asyncio.to_thread(self._measure)

    def check_health(self) -> None:
        """Raises when the loop has ended or hangs: Ray then starts another controller."""
        idle_s = time.monotonic() - self._ticked_s
        if self._task.done() or idle_s > _HUNG_S:
            raise RuntimeError(f"the controller's last tick ended {idle_s:.0f} s ago")

    async def _run(self) -> None:
        while True:
            try:
                await self._tick()
            except Exception as error:
                self._log_failure(error)
            else:
                self._failure = ""
            self._ticked_s = time.monotonic()
            await asyncio.sleep(TICK_S)

    def _log_failure(self, error: Exception) -> None:
        if repr(error) != self._failure:  # once, not every second of an outage
            known = isinstance(error, LorikeetError)
            log.error(
                "controller_tick_failed",
                extra={"error": str(error)},
                exc_info=None if known else error,
            )
        self._failure = repr(error)

    async def _tick(self) -> None:
        reading = self._reading or asyncio.create_task(asyncio.to_thread(self._read_catalog))
        await asyncio.wait([reading], timeout=_STORE_TIMEOUT_S)
        self._reading = None if reading.done() else reading
        if self._pins_seq is not None:
            await self._update_replicas()
        if reading.done():
            reading.result()  # raises what is to be logged

    async def _update_replicas(self) -> None:
        now_s = time.monotonic()
        surveyed = now_s >= self._survey_due_s
        if surveyed:
            self._survey_due_s = now_s + SURVEY_S
            await asyncio.gather(*(reconciler.survey() for reconciler in self._reconcilers))
            self._survey_s = time.monotonic() - now_s
        if surveyed or self._pins is not self._placed_pins:
            await asyncio.to_thread(self._place, now_s, surveyed)
        await asyncio.gather(*(reconciler.send(now_s) for reconciler in self._reconcilers))

    def _read_catalog(self) -> None:
        """Resolve the pins anew if the catalog, as far as it is known, or the time changed them."""
        try:
            self._catalog.refresh()
        except StoreError:
            kept = self._kept_view.read() if self._catalog.state.seq == 0 else None
            if kept is not None:
                self._catalog.begin_with(kept.state)
            raise
        finally:
            seq, now = self._catalog.state.seq, time.time()
            if seq > 0 and (seq != self._pins_seq or now >= self._pins.until):
                self._pins = self._catalog.ask(lambda state: self._resolver.resolve(state, now))
                self._pins_seq = seq

    def _place(self, now_s: float, surveyed: bool) -> None:
        self._placed_pins = pins = self._pins
        placement = place_pins(pins, self._reports())
        if placement != self._placement:
            _log_change(self._placement, placement)
            self._placement = placement
        for reconciler in self._reconcilers:
            reconciler.decide(placement.targets, now_s, surveyed=surveyed)

    def _reports(self) -> list[ReplicaReport]:
        return [report for reconciler in self._reconcilers for report in reconciler.reports]

    def _measure(self) -> bytes:
        pins = pin_statuses(self._pins, self._reports(), self._placement)
        replicas = {each.base_model: each.replicas for each in self._reconcilers}
        return render(controller_metrics(pins, replicas, self._survey_s), {})

    async def _keep_snapshots(self) -> None:
        """Make a snapshot whenever one is due; beside the ticks, which it must not delay."""
        while True:
            await asyncio.sleep(_SNAPSHOT_PERIOD_S)
            if not self._catalog.snapshot_due:
                continue
            try:
                seq = await asyncio.to_thread(self._catalog.snapshot)
            except Exception as error:
                log.error("snapshot_failed", extra={"error": str(error)})
            else:
                log.info("snapshot_made", extra={"seq": seq})

    async def _compact_usage(self) -> None:
        """Join the usage files of the last hours, so that a new reader reads few."""
        while True:
            await asyncio.sleep(_COMPACTION_PERIOD_S)
            try:
                await asyncio.to_thread(compact_recent_days, self._catalog.store, time.time())
            except Exception as error:
                log.error("usage_not_joined", extra={"error": str(error)})


def _log_change(before: PlacementPlan | None, after: PlacementPlan) -> None:
    """Log a new plan, and pins that it cannot meet and the one before could."""
    adapters = sum(map(len, after.targets.values()))
    short = {(each.pin.label, str(each.ref)): each.reason for each in after.shortfalls}
    log.info("plan_published", extra={"adapters": adapters, "shortfalls": len(short)})
    known = {(each.pin.label, str(each.ref)) for each in before.shortfalls} if before else set()
    for pin, adapter in sorted(short.keys() - known):
        why = short[pin, adapter]
        log.warning("pin_unmet", extra={"pin": pin, "adapter": adapter, "why": why})
