"""An engine replica whose status tests can lose, and whose own code they can break.

The service under test runs these.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lorikeet.protocol.messages import Call
from lorikeet.routing.status_update import StatusUpdate
from lorikeet.serving.deployments import EngineReplica
from lorikeet_engine.request import Request

FOLDER = "TEST_FAULTS_FOLDER"
"""The environment variable that names a folder; a file in it loses the channel of its name."""


@contextmanager
def faults(**channels: str) -> Iterator[None]:
    """Lose `stats`, `feed` or `metrics` on all replicas.

    By "raise", or by "hang" until the block ends. tokenizing="raise" breaks every request there,
    with an exception that quotes it.
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
    """An EngineReplica while no file says otherwise."""

    async def record_routing_stats(self) -> dict[str, Any]:
        await _lose("stats")
        return await super().record_routing_stats()

    async def status_updates(self, replica: str) -> AsyncIterator[StatusUpdate]:
        async for update in super().status_updates(replica):
            await _lose("feed")
            yield update

    async def metrics(self) -> bytes:
        await _lose("metrics")
        return await super().metrics()

    def _request(self, call: Call) -> Request:
        if (Path(os.environ[FOLDER]) / "tokenizing").exists():
            raise RuntimeError(f"a test breaks {call}")
        return super()._request(call)


async def _lose(channel: str) -> None:
    file = Path(os.environ[FOLDER]) / channel
    while file.exists():
        if file.read_text() == "raise":
            raise RuntimeError(f"a test loses {channel}")
        await asyncio.sleep(0.1)
