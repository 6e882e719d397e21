"""A stream from every replica of one deployment, as long as there is that replica."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from ray.serve.handle import DeploymentResponseGenerator

from lorikeet.routing.fleet import Fleet
from lorikeet.serving.handles import LOST, is_own_cancelling

log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""So soon a stream is opened from a new replica, and closed on one that Serve takes out of service.
"""
_PAUSES_S = (0.1, 0.5, 2.0)  # before one that failed is opened again


@dataclass(frozen=True, slots=True)
class ReplicaStreams:
    """Keeps one stream from each replica open.

    opened: calls a replica, by its name. heard: takes its name and what the stream says. silence_s:
    one that says nothing for so long is opened anew; None: it may. needed: whether the stream of a
    replica that takes no more calls is needed still; Serve waits for it to be closed.
    """

    fleet: Fleet
    opened: Callable[[str], DeploymentResponseGenerator[Any]]
    heard: Callable[[str, Any], None]
    silence_s: float | None
    needed: Callable[[str], bool]

    async def follow(self) -> NoReturn:
        """Until cancelled."""
        listening: dict[str, asyncio.Task[NoReturn]] = {}
        try:
            while True:
                exist = set(self.fleet.replicas)
                for gone in [name for name in listening.keys() - exist if not self.needed(name)]:
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
                if is_own_cancelling():
                    raise
                if isinstance(error, LOST):
                    self.fleet.lost(replica)
                log.info("stream_broken", extra={"replica": replica, "error": repr(error)})
                await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
                failures += 1

    async def _listen_once(self, replica: str) -> None:
        """To the stream's end."""
        stream = self.opened(replica)
        try:
            while True:
                async with asyncio.timeout(self.silence_s):
                    said = await anext(stream)
                self.heard(replica, said)
        except StopAsyncIteration:
            return
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]
