"""A replica that only replays, and an application that only answers: what a gateway stands on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.types import Receive, Scope, Send

from lorikeet.api.answers import DONE, EventStream
from lorikeet.api.messages import Call, Header, StreamItem
from lorikeet.placement.report import ReplicaReport
from lorikeet.routing.news import ReplicaNews, to_stats
from lorikeet.serving.bulletin import Bulletin
from lorikeet.serving.mailbox import Mailbox, pieces_per_s
from lorikeet.settings import Settings
from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import StepCosts
from lorikeet_engine.request import EngineReport, Tokens

TOKEN = b"~"
"""Once in the event of every token, and nowhere else in an answer."""


class Replay:
    """A replica whose tokens cost nothing: each step, `pace` times a second, all streams get one.

    Between its steps and Serve it does what a Replica does.
    """

    def __init__(self, base_model: str, settings: Settings, pace: float) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._base_model = base_model
        self._bulletin = Bulletin(StepCosts())
        self._pieces_per_s = pieces_per_s(settings)
        self._mailboxes: dict[str, Mailbox] = {}
        self._stepping = asyncio.get_running_loop().create_task(self._step(1 / pace))

    async def generate(self, call: Call) -> AsyncIterator[StreamItem]:
        """max_tokens tokens, the first at once."""
        digest = call.adapter.digest if call.adapter else None
        yield Header(self._name, digest, Residency.GPU, self._bulletin.word())
        events = EventStream(call)
        yield events.delta(0, TOKEN.decode())
        token, left = events.delta(0, TOKEN.decode()), (call.max_tokens or 1) - 1
        mailbox = self._mailboxes[call.request_id] = Mailbox(self._rest_s)
        try:
            while left:
                made = min(left, len(await mailbox.take()))
                left -= made
                yield token * made
        finally:
            del self._mailboxes[call.request_id]
        yield DONE

    async def _step(self, step_s: float) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s += step_s
            await asyncio.sleep(next_s - loop.time())
            for request_id, mailbox in self._mailboxes.items():
                mailbox.put(Tokens(request_id, 0, (0,)))

    def _rest_s(self) -> float:
        return len(self._mailboxes) / self._pieces_per_s

    async def watch(self, replica: str) -> AsyncIterator[ReplicaNews]:
        """As a replica's."""
        assert replica == self._name
        async for news in self._bulletin.watch():
            yield news

    async def prefetch(self, _: object) -> None:
        """As a replica's, which has nothing to bring."""

    async def apply_plan(self, _: object) -> None:
        """As a replica's, which has nothing to keep."""

    async def report(self) -> ReplicaReport:
        """As an idle replica's."""
        return ReplicaReport(self._name, self._base_model, EngineReport(0, 0, 0, 1, 0, 1))

    async def record_routing_stats(self) -> dict[str, Any]:
        """As a replica's."""
        return to_stats(self._bulletin.word_with_costs())


class Bare:
    """What Serve takes itself: an application that answers at once."""

    def __serve_build_asgi_app__(self) -> Any:
        """See serve.ingress."""
        return _answer


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": TOKEN, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
