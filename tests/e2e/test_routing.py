"""A gateway's knowledge of real replicas, and its routing decisions."""

import asyncio
import time
from array import array
from contextlib import aclosing
from functools import partial
from threading import Thread

import pytest
from ray import serve

from demo.tasks import TASKS
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.protocol.messages import AnswerHeader, Attempt, Call, EncodedCall, Endpoint
from lorikeet.routing.fleet import fleet_of
from lorikeet.serving.engine_client import ServeEngineClient
from lorikeet.serving.request_router import routing_request_of
from lorikeet_engine.adapter import Residency
from lorikeet_engine.request import SamplingParams
from tests.e2e.conftest import REPLICAS
from tests.e2e.held_replica import held_deployment

BASE = "lorikeet-demo"
DEPLOYMENT = f"engine-{BASE}"
TASK = TASKS[2]
KNOWN_WITHIN_S = 0.15


@pytest.fixture
def ref(service):
    state = CatalogReader(open_store(service.catalog)).refresh()
    return state.resolve(TASK.model, TASK.tenant)


class Second:
    """Second gateway, in this process: a client of the engines, and its view of the fleet."""

    def __init__(self, application="default", deployment=DEPLOYMENT):
        self._loop = asyncio.new_event_loop()
        # The loop is never closed, as Serve keeps the handle until it is shut down.
        Thread(target=self._loop.run_forever, daemon=True).start()
        self.fleet = fleet_of(application, deployment)
        self.engines = self.run(self._start(application, deployment))

    def run(self, scenario):
        return asyncio.run_coroutine_threadsafe(scenario, self._loop).result(60)

    async def stop(self):
        for task in self.engines._tasks:
            task.cancel()
        await asyncio.gather(*self.engines._tasks, return_exceptions=True)

    def holders(self, digest):
        tier = self.fleet._locations.tier
        return {name for name in self.fleet.replicas if tier(name, digest) is Residency.GPU}

    def knows(self, digest, held):
        return self.holders(digest) >= held

    async def ask(self, call):
        async with aclosing(self.engines.stream_answer(BASE, call)) as items:
            found = [item async for item in items if not isinstance(item, Attempt)]
        assert isinstance(found[0], AnswerHeader)
        assert isinstance(found[-1], bytes)
        return found[0]

    async def _start(self, application, deployment):
        self.handle = serve.get_deployment_handle(deployment, application)
        return ServeEngineClient({BASE: self.handle}, "second")


@pytest.fixture(scope="module")
def second(service):
    gateway = Second()
    gateway.run(until(lambda: len(gateway.fleet.replicas) == REPLICAS, within_s=20))
    gateway.run(asyncio.sleep(1.5))  # until all replicas have reported their adapters
    yield gateway
    gateway.run(gateway.stop())


async def until(holds, within_s):
    """Wait until `holds` is true; return the seconds it took."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() - began_s < within_s
        await asyncio.sleep(0.002)
    return time.monotonic() - began_s


def a_call(request_id, ref):
    call = Call(
        request_id,
        Endpoint.COMPLETIONS,
        created=0,
        tenant=TASK.tenant,
        model=TASK.model,
        adapter=ref,
        max_tokens=4,
        sampling=SamplingParams(temperature=0),
        adapter_rank=8,
        adapter_bytes=100_000,
    )
    return EncodedCall(call, (array("i", [5, 6, 7]),))


def test_a_gateway_learns_within_150_ms_of_loads_that_it_did_not_cause(service, second, ref):
    """The controller, not this gateway, makes replicas load the adapter."""
    path, late_s = f"/pins/{TASK.model}", []

    async def follow():
        while len(second.holders(ref.digest)) < REPLICAS:
            held = await asyncio.to_thread(service.holders, TASK.model)
            late_s.append(await until(partial(second.knows, ref.digest, held), within_s=5))

    service.admin("PUT", path, json={"reason": "test", "replicas": None}).raise_for_status()
    try:
        second.run(follow())
    finally:
        service.admin("DELETE", path).raise_for_status()
    assert max(late_s) < KNOWN_WITHIN_S


def test_requests_after_the_first_find_their_adapter_on_the_gpu(second, ref):
    second.run(second.ask(a_call("first", ref)))
    rest = [second.run(second.ask(a_call(f"rest {number}", ref))) for number in range(5)]
    assert {header.residency for header in rest} == {Residency.GPU}
    best = second.fleet.rank_replicas(routing_request_of(a_call("more", ref)))[0].replica
    assert best in second.holders(ref.digest)
    assert not second.fleet._in_flight


def test_a_queued_requests_adapter_is_prefetched_and_open_streams_delay_no_shutdown(service, ref):
    serve.run(held_deployment(places=4), name="held", route_prefix=None)
    gateway = Second("held", "held")

    async def scenario():
        await asyncio.sleep(1.5)  # until the gateway's streams are open
        holding = [asyncio.create_task(gateway.ask(a_call(f"held {i}", ref))) for i in range(2)]
        await until(
            lambda: all(gateway.fleet.accepted_by(f"held {i}") for i in range(2)), within_s=20
        )
        waiting = asyncio.create_task(gateway.ask(a_call("waiting", ref)))
        await asyncio.sleep(1.0)
        assert not waiting.done()  # status feed and response stream take the other two slots
        holding[0].cancel()
        await waiting
        assert await gateway.handle.prefetched.remote() == {ref: 1}
        holding[1].cancel()

    gateway.run(scenario())
    began_s = time.monotonic()
    serve.delete("held")
    assert time.monotonic() - began_s < 30  # uncancelled: a minute, or forever
    gateway.run(gateway.stop())
