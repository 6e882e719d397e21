"""Background task that keeps a gateway's Fleet of one engine deployment up to date."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from lorikeet.protocol.status_update import StatusUpdate
from lorikeet.routing.fleet import Fleet
from lorikeet.serving.replica_calls import (
    ReplicaStreams,
    broadcast,
    is_being_cancelled,
    streaming_handle,
)
from lorikeet_engine.adapter import AdapterRef

log = logging.getLogger(__name__)

_PREFETCH_PERIOD_S = 0.25
"""Seconds between two messages that tell replicas which adapters waiting requests need."""
_SILENCE_S = 5.0
"""Seconds without a status update until a replica's status stream is opened again."""


class StatusSubscriber:
    """Subscriber to every replica's status, which updates the Fleet.

    Also tells replicas to prefetch the adapters of waiting requests.
    """

    def __init__(self, handle: DeploymentHandle[Any], fleet: Fleet) -> None:
        self._handle, self._fleet = handle, fleet
        self._streamed = streaming_handle(handle)
        self._feeds = ReplicaStreams(
            fleet,
            self._open_feed,
            fleet.on_status_update,
            _SILENCE_S,
            still_needed=lambda _replica: False,
        )

    async def run(self) -> None:
        """Receive status updates and send prefetches until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._feeds.run())
            tasks.create_task(self._send_prefetches())

    async def _send_prefetches(self) -> NoReturn:
        first = True
        while True:
            adapters = self._fleet.take_waiting_adapters()
            # The first broadcast makes Serve tell this process which replicas exist.
            if adapters or first:
                await self._prefetch(adapters)
            first = False
            await asyncio.sleep(_PREFETCH_PERIOD_S)

    async def _prefetch(self, adapters: Mapping[str, Mapping[AdapterRef, int]]) -> None:
        try:
            await broadcast(self._handle, "prefetch", adapters)
        except (Exception, asyncio.CancelledError) as error:
            if is_being_cancelled():
                raise
            log.warning("prefetch_failed", extra={"error": repr(error)})

    def _open_feed(self, replica: str) -> "DeploymentResponseGenerator[StatusUpdate]":
        feed = self._streamed.status_updates.remote(replica=replica)
        return cast("DeploymentResponseGenerator[StatusUpdate]", feed)
