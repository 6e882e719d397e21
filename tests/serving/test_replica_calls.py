"""Broadcasts to replicas through a fake handle."""

import asyncio
import gc

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from lorikeet.serving.replica_calls import broadcast_all, broadcast_with_failures


class Slow:
    """Fake handle, and the slow answer that it gives. ended: how the answer ended."""

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


def test_calls_run_to_their_end_when_the_caller_is_cancelled():
    """A cancelled call would leak memory in grpc.aio."""

    async def run():
        await cancelled_in_the_middle(Slow())
        assert await broadcast_with_failures(Slow(), "push") == (["held"], [])

    asyncio.run(run())


def test_failures_of_calls_with_a_cancelled_caller_are_not_logged(caplog):
    async def run():
        await cancelled_in_the_middle(Slow(DeploymentUnavailableError("engine")))
        gc.collect()
        with pytest.raises(DeploymentUnavailableError):
            await broadcast_with_failures(Slow(DeploymentUnavailableError("engine")), "push")

    asyncio.run(run())
    # other libraries' threads of earlier tests may still log
    ours = [each for each in caplog.records if each.name.startswith(("lorikeet", "asyncio"))]
    assert ours == []


def test_a_deployment_that_fails_is_logged_and_others_answer(caplog):
    answers = asyncio.run(broadcast_all([Slow(RayActorError()), Slow()], "report"))
    assert answers == ["held"]
    (record,) = caplog.records
    assert (record.message, record.method) == ("deployment_silent", "report")
