"""Keeps a gateway's knowledge of one engine deployment fresh, beside its requests."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from lorikeet.routing.fleet import Fleet
from lorikeet.routing.news import ReplicaNews
from lorikeet.serving.handles import LOST, broadcast, is_own_cancelling
from lorikeet_engine.adapter import AdapterRef

log = logging.getLogger(__name__)

_LOOK_S = 0.1
"""So soon a watch is opened on a new replica, and closed on one that Serve takes out of service."""
_DOOR_S = 0.25
"""At most so often replicas are told what is wanted at the door."""
_SILENCE_S = 5.0  # a watch that says nothing for so long is opened anew
_PAUSES_S = (0.1, 0.5, 2.0)  # before a watch that failed is opened again


class Watching:
    """Watches every replica, and tells them which adapters wait for a place."""

    def __init__(self, handle: DeploymentHandle[Any], fleet: Fleet) -> None:
        self._handle, self._fleet = handle, fleet
        self._watches: dict[str, asyncio.Task[NoReturn]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_replicas())
                tasks.create_task(self._attend_door())
        finally:
            for watch in self._watches.values():
                watch.cancel()

    async def _follow_replicas(self) -> NoReturn:
        while True:
            exist = set(self._fleet.replicas)
            for gone in self._watches.keys() - exist:
                # also where it drains: a watch must not be what it waits for
                self._watches.pop(gone).cancel()
            for new in exist - self._watches.keys():
                self._watches[new] = asyncio.create_task(self._watch(new))
            await asyncio.sleep(_LOOK_S)

    async def _attend_door(self) -> NoReturn:
        first = True
        while True:
            wanted = self._fleet.take_wanted()
            # Serve tells a process which replicas there are once it has called one.
            if wanted or first:
                await self._tell(wanted)
            first = False
            await asyncio.sleep(_DOOR_S)

    async def _tell(self, wanted: Mapping[str, Mapping[AdapterRef, int]]) -> None:
        try:
            await broadcast(self._handle, "prefetch", wanted)
        except (Exception, asyncio.CancelledError) as error:
            if is_own_cancelling():
                raise
            log.warning("prefetch_failed", extra={"error": repr(error)})

    async def _watch(self, replica: str) -> NoReturn:
        failures = 0
        while True:
            try:
                await self._listen(replica)
                failures = 0
            except (Exception, asyncio.CancelledError) as error:
                if is_own_cancelling():
                    raise
                if isinstance(error, LOST):
                    self._fleet.lost(replica)
                log.info("watch_broken", extra={"replica": replica, "error": repr(error)})
                await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
                failures += 1

    async def _listen(self, replica: str) -> None:
        """One watch, to its end."""
        handle = self._handle.options(stream=True)
        response = handle.watch.remote(replica=replica)
        news = cast("DeploymentResponseGenerator[ReplicaNews]", response)
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    self._fleet.heard(replica, await anext(news))
        except StopAsyncIteration:
            return
        finally:
            news.cancel()  # type: ignore[no-untyped-call]
