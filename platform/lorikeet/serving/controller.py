"""Deployment that turns pins and demand into adapters for replicas to keep and prefetch."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError
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
from lorikeet.serving.replica_calls import REPLICA_LOST
from lorikeet.serving.replica_reconciler import ReplicaReconciler
from lorikeet.settings import Settings
from lorikeet.usage.compaction import compact_recent_days

log = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between two ticks: the longest delay until a new pin's adapters start to load."""
_SNAPSHOT_PERIOD_S = 10.0
_COMPACTION_PERIOD_S = 3600.0
_HUNG_S = 120.0
"""Seconds without a finished tick after which the health check fails; a tick takes far less."""
_STORE_TIMEOUT_S = 2.0
"""Seconds that a tick waits for the store before it continues with the last view of the catalog."""


class Controller:
    """Control loop that plans which replicas pin and prefetch which adapters, and tells them.

    The plan follows from the pins in the catalog (the registry of adapters) and replicas' reports.

    A restart loses no state for long: the new controller computes the same plan, and learns demand
    from replicas' reports.

    While the store is unreachable, the controller continues with the last view of the catalog that
    it has read. A controller that starts during the outage uses the view that gateways of its
    machine keep on disk. Without a view the controller sends nothing, and replicas keep their pins.
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

    def __del__(self) -> None:
        """End all work; Serve calls this in an orderly shutdown."""
        if hasattr(self, "_compaction"):  # __init__ succeeded
            for task in (self._task, self._snapshots, self._compaction):
                task.cancel()

    async def metrics(self) -> bytes:
        """Return the controller's part of the metrics page."""
        return await asyncio.to_thread(self._measure)

    def check_health(self) -> None:
        """Raise RuntimeError if the loop has ended or hangs; Ray then starts a new controller."""
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
        ends = isinstance(error, (RayError, *REPLICA_LOST))  # Serve has ended the engines, or ends
        if ends and repr(error) != self._failure:
            log.warning("deployment_silent", extra={"error": repr(error)})
        elif repr(error) != self._failure:  # log an outage once, not at every tick
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
            reading.result()  # raises the error of a failed read, for _run to log

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
        """Refresh the catalog; resolve pins again if the catalog or passing time changed them.

        If the catalog cannot be read, resolves the pins of its last known view, then raises
        StoreError.
        """
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
        """Write a snapshot of the catalog whenever one is due, until cancelled.

        A separate task, so that the control loop is not delayed.
        """
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
        """Merge the usage files of today and yesterday every hour, until cancelled, so that new
        readers read few files.
        """
        while True:
            await asyncio.sleep(_COMPACTION_PERIOD_S)
            try:
                await asyncio.to_thread(compact_recent_days, self._catalog.store, time.time())
            except Exception as error:
                log.error("usage_not_joined", extra={"error": str(error)})


def _log_change(before: PlacementPlan | None, after: PlacementPlan) -> None:
    """Log a new plan, and the pins that the plan leaves unmet but the previous plan met."""
    adapters = sum(map(len, after.targets.values()))
    short = {(each.pin.label, str(each.ref)): each.reason for each in after.shortfalls}
    log.info("plan_published", extra={"adapters": adapters, "shortfalls": len(short)})
    known = {(each.pin.label, str(each.ref)) for each in before.shortfalls} if before else set()
    for pin, adapter in sorted(short.keys() - known):
        why = short[pin, adapter]
        log.warning("pin_unmet", extra={"pin": pin, "adapter": adapter, "why": why})
