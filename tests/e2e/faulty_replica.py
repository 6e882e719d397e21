"""Engine replica whose status tests can lose and whose code they can break.

The service under test runs such replicas.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lorikeet.protocol.messages import EncodedCall
from lorikeet.protocol.pushing import HoldPushed, HoldState, PushMessage
from lorikeet.protocol.status_update import StatusUpdate
from lorikeet.replica import replica
from lorikeet.replica.request_builder import PreparedCall
from lorikeet.serving.deployments import EngineReplica
from lorikeet.settings import Settings
from tests.e2e.slow_steps import FOLDER, breakable_engine

Build = Callable[[EncodedCall], Awaitable[PreparedCall]]


@contextmanager
def faults(**channels: str) -> Iterator[None]:
    """Break the named channels of all replicas until the block ends.

    stats, feed, metrics: "raise" makes the channel fail, "hang" makes it wait.
    files="raise": hide the gateway's files, as on another machine.
    requests="raise": fail every request, with an exception that quotes it. requests="exit": end the
        process of every replica that takes one.
    steps="6": let each step of an engine take six seconds longer.
    """
    files = {Path(os.environ[FOLDER]) / channel: how for channel, how in channels.items()}
    for file, how in files.items():
        file.write_text(how)
    try:
        yield
    finally:
        for file in files:
            file.unlink()


class FaultyReplica(EngineReplica):
    """EngineReplica that fails as the files in FOLDER say, and whose engine starts sooner."""

    def __init__(self, base_model: str, settings: Settings) -> None:
        replica.build_engine = breakable_engine
        super().__init__(base_model, settings)
        self._requests.build = _breakable(self._requests.build)  # type: ignore[method-assign]

    async def record_routing_stats(self) -> dict[str, Any]:
        await _lose("stats")
        return await super().record_routing_stats()

    async def status_updates(self, replica: str) -> AsyncIterator[StatusUpdate]:
        async for update in super().status_updates(replica):
            await _lose("feed")
            yield update

    async def push(self, message: PushMessage) -> HoldState:
        if isinstance(message, HoldPushed) and (Path(os.environ[FOLDER]) / "files").exists():
            message = HoldPushed(message.ref, "/of/another/machine")
        return await super().push(message)

    async def metrics(self) -> bytes:
        await _lose("metrics")
        return await super().metrics()


def _breakable(build: Build) -> Build:
    async def build_unless_broken(encoded: EncodedCall) -> PreparedCall:
        fault = Path(os.environ[FOLDER]) / "requests"
        if fault.exists():
            if fault.read_text() == "exit":
                os._exit(1)
            raise RuntimeError(f"a test breaks {encoded}")
        return await build(encoded)

    return build_unless_broken


async def _lose(channel: str) -> None:
    file = Path(os.environ[FOLDER]) / channel
    while file.exists():
        if file.read_text() == "raise":
            raise RuntimeError(f"a test loses {channel}")
        await asyncio.sleep(0.1)
