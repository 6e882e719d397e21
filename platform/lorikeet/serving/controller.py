"""Turns pins into what each replica keeps; never on a request's path."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.store import open_store
from lorikeet.placement.plan import PinnedAdapter, Plan, make_plan
from lorikeet.serving.engines import broadcast_report
from lorikeet.settings import Settings

log = logging.getLogger(__name__)

TICK_S = 1.0
"""A pin is seen within one tick; its load starts at once."""


class Controller:
    """Reads the catalog and what replicas report, and tells each replica its part of the plan.

    It holds no state: a restarted controller publishes the same plan.
    """

    def __init__(self, settings: Settings, engines: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._catalog = AdapterCatalog(open_store(settings.catalog))
        self._engines = engines
        self._published: dict[str, Plan] = {}
        self._task = asyncio.get_running_loop().create_task(self._run())

    def check_health(self) -> None:
        """Ray restarts the controller when its loop has ended."""
        if self._task.done():
            raise RuntimeError("the controller's loop ended") from self._task.exception()

    async def _run(self) -> None:
        while True:
            for base_model in self._engines:
                try:
                    await self._tick(base_model)
                except Exception:
                    log.exception("controller_tick_failed", extra={"base_model": base_model})
            await asyncio.sleep(TICK_S)

    async def _tick(self, base_model: str) -> None:
        state = await asyncio.to_thread(self._catalog.refresh)
        handle = self._engines[base_model]
        replicas = sorted(report.replica for report in await broadcast_report(handle))
        pins = [
            PinnedAdapter(ref, pin.tier, pin.replicas)
            for ref, pin in state.pin_refs(time.time()).items()
            if state.base_model_of(ref) == base_model
        ]
        plan = make_plan(pins, replicas)
        if plan != self._published.get(base_model):
            log.info("plan_published", extra={"base_model": base_model, "pins": len(pins)})
            self._published[base_model] = plan
        await handle.broadcast("apply_plan", plan).results_async()
