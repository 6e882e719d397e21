"""Keeps one stream open from every replica of a deployment, as long as that replica exists."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from ray.serve.handle import DeploymentResponseGenerator

from lorikeet.routing.fleet import Fleet
from lorikeet.serving.replica_calls import REPLICA_LOST, is_being_cancelled

log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""How soon a new replica's stream is opened, and that of one that Serve removes is closed."""
_PAUSES_S = (0.1, 0.5, 2.0)  # before one that failed is opened again


@dataclass(frozen=True, slots=True)
class ReplicaStreams:
    """Keeps one stream from each replica open.

    open_stream: calls a replica, by its name. on_item: takes its name and each item. silence_s: a
    stream without an item for so long is opened anew; None: never. still_needed: whether to keep
    the stream of a replica that takes no more calls; Serve waits for it to be closed.
    """

    fleet: Fleet
    open_stream: Callable[[str], DeploymentResponseGenerator[Any]]
    on_item: Callable[[str, Any], None]
    silence_s: float | None
    still_needed: Callable[[str], bool]

    async def run(self) -> NoReturn:
        """Open and read streams until cancelled."""
        listening: dict[str, asyncio.Task[NoReturn]] = {}
        try:
            while True:
                exist = set(self.fleet.replicas)
                for gone in [
                    name for name in listening.keys() - exist if not self.still_needed(name)
                ]:
                    listening.pop(gone).cancel()
                for new in exist - listening.keys():
                    listening[new] = asyncio.create_task(self._listen(new))
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in listening.values():
                task.cancel()

    async def _listen(self, replica: str) -> NoReturn:
        failures = 0
        while True:
            try:
                await self._listen_once(replica)
                failures = 0
            except (Exception, asyncio.CancelledError) as error:
                if is_being_cancelled():
                    raise
                if isinstance(error, REPLICA_LOST):
                    self.fleet.on_replica_lost(replica)
                log.info("stream_broken", extra={"replica": replica, "error": repr(error)})
                await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
                failures += 1

    async def _listen_once(self, replica: str) -> None:
        """Read one stream to its end."""
        stream = self.open_stream(replica)
        try:
            while True:
                async with asyncio.timeout(self.silence_s):
                    item = await anext(stream)
                self.on_item(replica, item)
        except StopAsyncIteration:
            return
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]
