"""Calls of all replicas, by a handle that is not Serve's."""

import asyncio
import gc

import pytest
from ray.serve.exceptions import DeploymentUnavailableError

from lorikeet.serving.replica_calls import broadcast_with_failures


class Slow:
    """A replica's answer, and all that a handle has to give one. ended: how it came to its end."""

    def __init__(self, error=None):
        self.begun, self.ended, self._error = asyncio.Event(), asyncio.Event(), error

    def broadcast(self, _method):
        return self

    async def _fetch_replica_results_async(self):
        if self._error:
            self.begun.set()
            await asyncio.sleep(0.05)
            self.ended.set()
            raise self._error
        return [self]

    async def get_async(self):
        self.begun.set()
        await asyncio.sleep(0.05)
        self.ended.set()
        return "held"


async def cancelled_in_the_middle(slow):
    caller = asyncio.create_task(broadcast_with_failures(slow, "push"))
    await slow.begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not slow.ended.is_set()
    async with asyncio.timeout(5):
        await slow.ended.wait()
    await asyncio.sleep(0.01)


def test_calls_come_to_their_end_without_their_caller():
    """gRPC's library keeps memory of each call that is cancelled."""

    async def run():
        await cancelled_in_the_middle(Slow())
        assert await broadcast_with_failures(Slow(), "push") == (["held"], [])

    asyncio.run(run())


def test_nobody_hears_how_calls_failed_whose_caller_is_gone(caplog):
    async def run():
        await cancelled_in_the_middle(Slow(DeploymentUnavailableError("engine")))
        gc.collect()
        with pytest.raises(DeploymentUnavailableError):
            await broadcast_with_failures(Slow(DeploymentUnavailableError("engine")), "push")

    asyncio.run(run())
    assert caplog.records == []
