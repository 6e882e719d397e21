"""Turns pins into what each replica keeps; never on a request's path."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.store import open_store
from lorikeet.errors import LorikeetError
from lorikeet.placement.plan import PinnedAdapter, Plan, make_plan
from lorikeet.placement.report import ReplicaReport
from lorikeet.serving.engines import broadcast
from lorikeet.serving.logs import log_to_stderr
from lorikeet.settings import Settings

log = logging.getLogger(__name__)

TICK_S = 1.0
"""A pin is seen within one tick; its load starts at once."""
_SNAPSHOT_GAP_S = 10.0
_SILENT_S = 120.0  # longer than an object store may hang before its client gives up

Pins = Mapping[str, Sequence[PinnedAdapter]]
"""By the base model that serves them."""


class Controller:
    """Reads the catalog and what replicas report, and tells each replica its part of the plan.

    It keeps nothing that a restart would lose: a new controller publishes the same plan.
    """

    def __init__(self, settings: Settings, engines: Mapping[str, DeploymentHandle[Any]]) -> None:
        log_to_stderr()
        self._catalog = AdapterCatalog(open_store(settings.catalog))
        self._engines = engines
        self._published: dict[str, Plan] = {}  # for the log alone
        self._failure = ""
        self._ticked_s = time.monotonic()
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run())
        self._snapshots = loop.create_task(self._keep_snapshots())

    def check_health(self) -> None:
        """Raises when the loop has ended or hangs: Ray then starts another controller."""
        idle_s = time.monotonic() - self._ticked_s
        if self._task.done() or idle_s > _SILENT_S:
            raise RuntimeError(f"the controller's last tick ended {idle_s:.0f} s ago")

    async def _run(self) -> None:
        while True:
            try:
                pins = await asyncio.to_thread(self._pins)
                await asyncio.gather(*(self._publish(pins, name) for name in self._engines))
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

    def _pins(self) -> Pins:
        self._catalog.refresh()
        return self._catalog.ask(_pins_by_base_model)

    async def _publish(self, pins: Pins, base_model: str) -> None:
        handle = self._engines[base_model]
        reports: list[ReplicaReport] = await broadcast(handle, "report")
        wanted = pins.get(base_model, [])
        plan = make_plan(wanted, sorted(report.replica for report in reports))
        if plan != self._published.get(base_model):
            log.info("plan_published", extra={"base_model": base_model, "pins": len(wanted)})
            self._published[base_model] = plan
        await broadcast(handle, "apply_plan", plan)

    async def _keep_snapshots(self) -> None:
        """Make a snapshot whenever one is due; beside the ticks, which it must not delay."""
        while True:
            await asyncio.sleep(_SNAPSHOT_GAP_S)
            if not self._catalog.snapshot_due:
                continue
            try:
                seq = await asyncio.to_thread(self._catalog.snapshot)
            except Exception as error:
                log.error("snapshot_failed", extra={"error": str(error)})
            else:
                log.info("snapshot_made", extra={"seq": seq})


def _pins_by_base_model(state: CatalogState) -> Pins:
    pins: dict[str, list[PinnedAdapter]] = {}
    for ref, pin in state.pin_refs(time.time()).items():
        pinned = PinnedAdapter(ref, pin.tier, pin.replicas)
        pins.setdefault(state.base_model_of(ref), []).append(pinned)
    return pins
