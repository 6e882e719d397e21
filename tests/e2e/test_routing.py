"""What a gateway knows of real replicas, and where it therefore sends requests."""

import asyncio
import time
from contextlib import aclosing, asynccontextmanager

import pytest
from ray import serve

from demo.tasks import TASKS
from lorikeet.api.asks import ask_of
from lorikeet.api.messages import Call, Endpoint, Header
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.store import open_store
from lorikeet.routing.choice import Work
from lorikeet.serving.engines import ServeEngines
from lorikeet.serving.fleets import fleet_of
from lorikeet_engine.adapter import Residency
from lorikeet_engine.request import SamplingParams
from tests.e2e.conftest import REPLICAS

BASE = "lorikeet-demo"
DEPLOYMENT = f"engine-{BASE}"
TASK = TASKS[2]
KNOWN_WITHIN_S = 0.15


@pytest.fixture
def ref(service):
    state = AdapterCatalog(open_store(service.catalog)).refresh()
    return state.resolve(TASK.model, TASK.tenant)


@asynccontextmanager
async def gateway():
    """A second gateway, in this process: its way to the engines, and what it knows of them."""
    engines = ServeEngines({BASE: serve.get_deployment_handle(DEPLOYMENT, "default")})
    fleet = fleet_of("default", DEPLOYMENT)
    try:
        await until(lambda: len(fleet.replicas) == REPLICAS, within_s=20)
        yield engines, fleet
    finally:
        for task in engines._tasks:
            task.cancel()
        await asyncio.gather(*engines._tasks, return_exceptions=True)


async def until(holds, within_s):
    """How long it took until something holds."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() - began_s < within_s
        await asyncio.sleep(0.002)
    return time.monotonic() - began_s


def a_call(request_id, ref):
    return Call(
        request_id,
        Endpoint.COMPLETIONS,
        created=0,
        tenant=TASK.tenant,
        model=TASK.model,
        adapter=ref,
        prompts=("once upon",),
        max_tokens=4,
        sampling=SamplingParams(temperature=0),
        work=Work(3, rank=8, adapter_bytes=100_000),
    )


async def ask(engines, call):
    async with aclosing(engines.generate(BASE, call)) as items:
        found = [item async for item in items]
    assert isinstance(found[0], Header)
    assert isinstance(found[-1], bytes)
    return found[0]


def test_a_gateway_hears_of_what_others_moved_within_150_ms(service, ref):
    """It sends nothing itself: a replica is told by the service's own gateway to bring it."""

    async def scenario():
        async with gateway() as (_, fleet):
            tiers = fleet._residents.tier

            def holders():
                return {name for name in fleet.replicas if tiers(name, ref.digest) is Residency.GPU}

            await asyncio.sleep(1.5)  # all have said what they hold
            late_s = []
            path = f"/pins/{TASK.model}"
            body = {"reason": "test", "replicas": None}
            await asyncio.to_thread(service.admin, "PUT", path, json=body)
            while len(holders()) < REPLICAS:
                before = await asyncio.to_thread(service.holders, TASK.model)
                late_s.append(await until(lambda held=before: holders() >= held, within_s=5))
            await asyncio.to_thread(service.admin, "DELETE", path)
            return late_s

    late_s = asyncio.run(scenario())
    assert max(late_s) < KNOWN_WITHIN_S


def test_requests_stay_where_the_adapter_is_also_from_a_gateway_that_just_began(service, ref):
    async def scenario():
        async with gateway() as (engines, fleet):
            first = await ask(engines, a_call("first", ref))
            assert fleet.order(ask_of(a_call("x", ref)))[0] == first.replica
            rest = [await ask(engines, a_call(f"r{number}", ref)) for number in range(5)]
            assert {header.replica for header in rest} == {first.replica}
            assert {header.residency for header in rest} == {Residency.GPU}
            assert not fleet._sent

    asyncio.run(scenario())
