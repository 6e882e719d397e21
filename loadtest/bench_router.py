"""What our router adds to a call through Serve, beside Serve's own power of two choices.

Two deployments of replicas that answer at once, one under each router, are called in turn, so
that whatever else runs here delays both. Ours knows 10,000 adapters, 1,000 of them on each GPU,
and keeps its watches open meanwhile. From the call to the first item of its stream.

Usage: python -m loadtest.bench_router. Ends with status 1 if ours adds more than 0.5 ms at p50.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import httpx
import numpy as np
from ray import serve
from ray.serve.handle import DeploymentHandle

from loadtest.cluster import cluster
from loadtest.report import quantiles_ms
from lorikeet.protocol.messages import AnswerHeader, Call, Endpoint, Work
from lorikeet.protocol.status_update import StatusUpdate
from lorikeet.replica.status_feed import StatusFeed
from lorikeet.routing.fleet import Fleet
from lorikeet.serving.fleet_registry import fleet_of
from lorikeet.serving.status_subscriber import StatusSubscriber
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.telemetry.status import EngineStatus, LiveStats
from lorikeet_engine.traffic import Zipf

REPLICAS = 4
ADAPTERS = 10_000
ON_GPU = 1_000  # of each replica
CALLERS = 4
CALLS = 1_500  # of each router, by each caller
WARM_UP = 100
MOST_ADDED_S = 0.5e-3
_OURS, _SERVES = "ours", "power of two"
_LIVE = LiveStats(running=40, decoding=40, ranks=400, free_bytes=1 << 30, room_bytes=1 << 34)


class Echo:
    """Answers at once; says that it holds adapters."""

    def __init__(self) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._feed = StatusFeed(EngineStatus())
        held = Random(self._name).sample(range(ADAPTERS), ON_GPU)
        moved = {_digest(i): Residency.GPU for i in held}
        self._feed.post(EngineStatus(_LIVE, moved=moved))

    async def generate(self, _: Call) -> AsyncIterator[AnswerHeader]:
        """A header, as a replica's first item is."""
        yield AnswerHeader(self._name, None, None, self._feed.update())

    async def status_updates(self, replica: str) -> AsyncIterator[StatusUpdate]:
        """Status updates, as a replica sends them."""
        assert replica == self._name
        async for update in self._feed.subscribe():
            yield update

    async def prefetch(self, wanted: object) -> None:
        """Take prefetches, as a replica does, and load nothing."""


class Gateway:
    """Makes the calls, from within Serve as a gateway does."""

    def __init__(self, **handles: DeploymentHandle[Any]) -> None:
        self._handles = handles

    async def __call__(self, _: object) -> dict[str, list[float]]:
        """Seconds to each call's first item, by router; the answer to any HTTP request."""
        ours = self._handles["ours"]
        fleet = fleet_of(ours.app_name, ours.deployment_name)
        subscribed = asyncio.create_task(StatusSubscriber(ours, fleet).run())
        while len(fleet.replicas) < REPLICAS:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # until all have said what they hold
        took: dict[str, list[float]] = {_OURS: [], _SERVES: []}
        await asyncio.gather(*(self._call(fleet, seed, took) for seed in range(CALLERS)))
        subscribed.cancel()
        return took

    async def _call(self, fleet: Fleet, seed: int, took: dict[str, list[float]]) -> None:
        rng = np.random.default_rng(seed)
        adapters = Zipf(1.0).draw(rng, ADAPTERS, CALLS + WARM_UP)
        for turn, adapter in enumerate(adapters.tolist()):
            call = _call(f"{seed} {turn}", adapter)
            fleet.on_begun(call.request_id)
            ours_s = await _first_item_s(self._handles["ours"], call)
            fleet.on_ended(call.request_id)
            serves_s = await _first_item_s(self._handles["serves"], call)
            if turn >= WARM_UP:
                took[_OURS].append(ours_s)
                took[_SERVES].append(serves_s)


async def _first_item_s(handle: DeploymentHandle[Any], call: Call) -> float:
    began_s = time.perf_counter()
    answer: Any = handle.options(stream=True).generate.remote(call)
    await anext(answer)
    took_s = time.perf_counter() - began_s
    async for _ in answer:
        pass
    return took_s


def _call(request_id: str, adapter: int) -> Call:
    return Call(
        request_id,
        Endpoint.CHAT,
        created=0,
        tenant="acme",
        model="acme/any",
        adapter=AdapterRef("acme", "any", 1, _digest(adapter)),
        messages=({"role": "user", "content": f"{request_id}: " + "word " * 800},),
        work=Work(prompt_tokens=1_000, rank=16, adapter_bytes=84_000_000),
    )


def _digest(adapter: int) -> str:
    return f"{adapter:064x}"


def _deployment(name: str, **options: Any) -> Any:
    deployment = serve.deployment(
        name=name,
        num_replicas=REPLICAS,
        max_ongoing_requests=256,
        ray_actor_options={"num_cpus": 0.1},
        **options,
    )
    return deployment(Echo).bind()


def main() -> int:
    """Print p50 and p99 of both; the exit status."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    ours = _deployment(
        "ours",
        request_router_config={
            "request_router_class": "lorikeet.serving.request_router.AdapterAffinityRouter",
            "request_routing_stats_period_s": 1,
        },
    )
    gateway = serve.deployment(name="gateway", ray_actor_options={"num_cpus": 0.1})(Gateway)
    with cluster() as url:
        serve.run(gateway.bind(ours=ours, serves=_deployment("serves")))
        took = httpx.get(url, timeout=900).raise_for_status().json()
    print(f"{CALLERS} callers, {CALLS * CALLERS} calls a router in turn, {os.cpu_count()} CPUs")
    quantiles = {router: quantiles_ms(seconds) for router, seconds in took.items()}
    for router, ms in quantiles.items():
        print(f"{router:14}p50 {ms['p50']:.2f} ms, p99 {ms['p99']:.2f} ms")
    added_ms = quantiles[_OURS]["p50"] - quantiles[_SERVES]["p50"]
    print(f"ours adds {added_ms:.2f} ms at p50")
    return 0 if added_ms <= MOST_ADDED_S * 1e3 else 1


if __name__ == "__main__":
    sys.exit(main())
