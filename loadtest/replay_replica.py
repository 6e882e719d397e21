"""Replica that replays tokens, and ASGI application that answers at once, to measure a gateway."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ray import serve
from starlette.types import Receive, Scope, Send

from lorikeet.apis.answer import event_stream, refusal_of
from lorikeet.protocol.messages import AnswerHeader, EncodedCall, Endpoint, FinalUsage, Refusal
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.protocol.response_stream import DeltaGroup, ResponseStream, ResponseStreams
from lorikeet.protocol.status_update import StatusUpdate, to_stats
from lorikeet.replica.status_feed import StatusFeed
from lorikeet.settings import Settings
from lorikeet.text.choice import Ending
from lorikeet_engine.adapter import Residency
from lorikeet_engine.errors import EngineClosed
from lorikeet_engine.telemetry.status import EngineStatus, TierStatus

_IDLE = EngineStatus(tiers={tier: TierStatus(0, 0, 1, 0, 0) for tier in list(Residency)[1:]})
_TOKEN = "~"
_BARE = (
    b'data: {"choices":[{"index":0,"delta":{"content":"~"},"finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\ndata: [DONE]\n\n',
)
"""Answer of one token: its event, and the end of the stream."""


@dataclass(slots=True)
class _Stream:
    """Running answer.

    left: tokens still to send.
    """

    responses: ResponseStream
    token: bytes
    left: int
    ended: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _WholeAnswer:
    """`AnswerProgress` of a replayed answer, whose usage is known from the start."""

    taken: FinalUsage

    def usage(self) -> FinalUsage:
        return self.taken

    def choice_usage(self, _: int) -> FinalUsage:
        return self.taken

    def stop_string(self, _: int) -> None:
        return None


class ReplayReplica:
    """Replica whose tokens cost nothing: each of `pace` steps a second gives every stream one.

    Between its steps and Serve it does the same work as a Replica.
    """

    def __init__(self, base_model: str, _: Settings, pace: float) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._base_model = base_model
        self._feed = StatusFeed(_IDLE)
        self._response_streams = ResponseStreams()
        self._streams: dict[str, _Stream] = {}
        self._stepping = asyncio.get_running_loop().create_task(self._step(1 / pace))

    async def run_call(self, encoded: EncodedCall, gateway: str) -> AsyncIterator[Refusal | None]:
        """Send `max_tokens` tokens, the first at once. Only chats may ask for more than one.

        All events of a chat's tokens have the same bytes, which makes the steps cheap.
        """
        call = encoded.call
        responses = await self._response_streams.to(gateway)
        digest = call.adapter.digest if call.adapter else None
        header = AnswerHeader(self._name, digest, Residency.GPU, self._feed.update())
        tokens = call.max_tokens or 1
        usage = FinalUsage(prompt_tokens=1, cached_tokens=0, completion_tokens=tokens)
        events = event_stream(call, _WholeAnswer(usage))
        responses.put(encoded.attempt_id, (header, events.delta(0, _TOKEN)))
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = tokens - 1
        assert not left or call.endpoint is Endpoint.CHAT
        token = events.delta(0, _TOKEN) if left else b""
        self._streams[encoded.attempt_id] = _Stream(responses, token, left, ended)
        try:
            if left:
                await responses.wait_for(ended)
            end = events.delta(0, "", Ending.LENGTH) + events.end(usage)
            responses.put(encoded.attempt_id, (end,), ended=True)
            yield None
        except EngineClosed as error:
            yield refusal_of(error)
        finally:
            del self._streams[encoded.attempt_id]

    async def response_stream(self, replica: str, gateway: str) -> AsyncIterator[list[DeltaGroup]]:
        """Yield deltas for a gateway, as a replica streams them."""
        assert replica == self._name
        with self._response_streams.opened(gateway) as responses:
            while not responses.closed:
                yield await responses.take()

    async def _step(self, step_s: float) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s += step_s
            await asyncio.sleep(next_s - loop.time())
            for request_id, stream in self._streams.items():
                if stream.left:
                    stream.responses.put(request_id, (stream.token,))
                    stream.left -= 1
                    if not stream.left and not stream.ended.done():
                        stream.ended.set_result(None)

    async def status_updates(self, replica: str) -> AsyncIterator[StatusUpdate]:
        """Yield status updates, as a replica sends them."""
        assert replica == self._name
        async for update in self._feed.subscribe():
            yield update

    async def prefetch(self, _: object) -> None:
        """Accept prefetches and load nothing."""

    async def apply_plan(self, _: object) -> None:
        """Accept a placement decision and keep nothing."""

    async def report(self, _: object) -> ReplicaReport:
        """Return the report of an idle replica."""
        return ReplicaReport(self._name, self._base_model, _IDLE)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return stats for Serve, as a replica does."""
        return to_stats(self._feed.update_with_costs())


class BareApp:
    """ASGI application that answers at once, to measure Serve alone."""

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application, for serve.ingress."""
        return _answer


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part, more in zip(_BARE, (True, False), strict=True):
        await send({"type": "http.response.body", "body": part, "more_body": more})
