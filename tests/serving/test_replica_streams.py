"""Streams that a gateway keeps open from every replica."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from ray.exceptions import RayActorError

from lorikeet.routing.fleet import Fleet
from lorikeet.serving import replica_calls
from lorikeet.serving.replica_calls import ReplicaStreams
from tests.serving.fake_stream import FakeStream
from tests.waiting import until


class Replicas:
    """Fake replicas: their streams in the order of opening, and the received items."""

    def __init__(self, silence_s):
        self.fleet = Fleet()
        self.opened, self.received, self.needed = [], [], set()
        self._streams = ReplicaStreams(
            self.fleet,
            self._open,
            lambda replica, item: self.received.append((replica, item)),
            silence_s,
            self.needed.__contains__,
        )

    def _open(self, replica):
        self.opened.append(FakeStream(replica))
        return self.opened[-1]

    @asynccontextmanager
    async def followed(self):
        following = asyncio.create_task(self._streams.run())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait([following])


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(replica_calls, "_POLL_S", 0.005)
    monkeypatch.setattr(replica_calls, "_REOPEN_DELAYS_S", (0.01, 0.02))


def run(scenario, silence_s=None):
    async def inside():
        replicas = Replicas(silence_s)
        async with replicas.followed():
            await asyncio.wait_for(scenario(replicas), 20)
        await asyncio.sleep(0)
        assert all(stream.cancelled for stream in replicas.opened)

    asyncio.run(inside())


def names(replicas):
    return [stream.replica for stream in replicas.opened]


def test_a_stream_is_open_from_each_replica_and_closed_when_the_replica_is_gone():
    async def scenario(replicas):
        replicas.fleet.set_replicas(["r0", "r1"])
        await until(lambda: set(names(replicas)) == {"r0", "r1"})
        for stream in replicas.opened:
            stream.say("hello")
        await until(lambda: set(replicas.received) == {("r0", "hello"), ("r1", "hello")})
        replicas.fleet.set_replicas(["r1", "r2"])
        gone = next(stream for stream in replicas.opened if stream.replica == "r0")
        await until(lambda: gone.cancelled and "r2" in names(replicas))
        assert sorted(names(replicas)) == ["r0", "r1", "r2"]

    run(scenario)


def test_the_stream_of_a_removed_replica_stays_open_while_needed():
    async def scenario(replicas):
        replicas.fleet.set_replicas(["r0"])
        await until(lambda: replicas.opened)
        (stream,) = replicas.opened
        replicas.needed.add("r0")
        replicas.fleet.set_replicas([])
        await asyncio.sleep(0.1)
        stream.say("the end")
        await until(lambda: replicas.received == [("r0", "the end")])
        assert not stream.cancelled
        replicas.needed.clear()
        await until(lambda: stream.cancelled)

    run(scenario)


@pytest.mark.parametrize("end", [StopAsyncIteration(), RuntimeError("broken"), RayActorError()])
def test_an_ended_stream_is_reopened_and_a_lost_replica_is_reported(end):
    async def scenario(replicas):
        replicas.fleet.set_replicas(["r0", "r1"])
        await until(lambda: len(replicas.opened) == 2)
        first = next(stream for stream in replicas.opened if stream.replica == "r0")
        first.say(end)
        await until(lambda: names(replicas).count("r0") == 2)
        assert first.cancelled
        lost = isinstance(end, RayActorError)
        assert set(replicas.fleet.usable) == ({"r1"} if lost else {"r0", "r1"})
        replicas.opened[-1].say("again")
        await until(lambda: replicas.received == [("r0", "again")])

    run(scenario)


def test_a_silent_stream_is_reopened():
    async def scenario(replicas):
        replicas.fleet.set_replicas(["r0"])
        await until(lambda: len(replicas.opened) >= 3)

    run(scenario, silence_s=0.02)
