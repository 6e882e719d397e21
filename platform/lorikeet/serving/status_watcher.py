"""Keeps a gateway's knowledge of one engine deployment fresh, beside its requests."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from lorikeet.routing.fleet import Fleet
from lorikeet.routing.status_update import StatusUpdate
from lorikeet.serving.handles import broadcast, is_own_cancelling, streaming
from lorikeet.serving.replica_streams import ReplicaStreams
from lorikeet_engine.adapter import AdapterRef

log = logging.getLogger(__name__)

_DOOR_S = 0.25
"""At most so often replicas are told what is wanted at the door."""
_SILENCE_S = 5.0


class StatusWatcher:
    """Watches every replica, and tells them which adapters wait for a place."""

    def __init__(self, handle: DeploymentHandle[Any], fleet: Fleet) -> None:
        self._handle, self._fleet = handle, fleet
        self._streamed = streaming(handle)
        self._watches = ReplicaStreams(
            fleet, self._watch, fleet.heard, _SILENCE_S, needed=lambda _replica: False
        )

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watches.follow())
            tasks.create_task(self._attend_door())

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

    def _watch(self, replica: str) -> "DeploymentResponseGenerator[StatusUpdate]":
        watch = self._streamed.watch.remote(replica=replica)
        return cast("DeploymentResponseGenerator[StatusUpdate]", watch)
