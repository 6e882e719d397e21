"""Replica without an engine that never ends the requests named "held…"."""

import asyncio

from ray import serve

from lorikeet.protocol.messages import AnswerHeader
from lorikeet.protocol.response_stream import ResponseStreams
from lorikeet.replica.status_feed import StatusFeed
from lorikeet_engine.telemetry.status import EngineStatus


class Held:
    def __init__(self):
        self._name = serve.get_replica_context().replica_id.unique_id
        self._feed = StatusFeed(EngineStatus())
        self._response_streams = ResponseStreams()
        self._prefetches = {}

    async def run_call(self, encoded, gateway):
        request_id = encoded.attempt_id
        stream = await self._response_streams.to(gateway)
        stream.put(request_id, (AnswerHeader(self._name, None, None, self._feed.update()),))
        if request_id.startswith("held"):
            await asyncio.Event().wait()
        stream.put(request_id, (b"done",), ended=True)
        yield None

    async def response_stream(self, replica, gateway):
        with self._response_streams.opened(gateway) as stream:
            while not stream.closed:
                yield await stream.take()

    async def status_updates(self, replica):
        async for update in self._feed.subscribe():
            yield update

    async def prefetch(self, wanted):
        self._prefetches |= wanted.get(self._name, {})

    async def prefetched(self):
        return self._prefetches


def held_deployment(places):
    made = serve.deployment(
        name="held",
        num_replicas=1,
        max_ongoing_requests=places,
        ray_actor_options={"num_cpus": 0.05},
        graceful_shutdown_timeout_s=60,
        request_router_config={
            "request_router_class": "lorikeet.serving.request_router.AdapterAffinityRouter"
        },
    )
    return made(Held).bind()
