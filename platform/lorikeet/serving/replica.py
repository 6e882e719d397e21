"""One engine behind Ray Serve: text in, the client's bytes out."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from lorikeet.api.messages import Call, Header, Refusal, StreamItem
from lorikeet.catalog.store import open_store
from lorikeet.errors import InvalidInput
from lorikeet.placement.plan import Keep, Plan
from lorikeet.placement.report import ReplicaReport
from lorikeet.serving.answer import Answer, refusal_of
from lorikeet.serving.engine_settings import engine_settings
from lorikeet.serving.prompts import PromptEncoder
from lorikeet.serving.router import RESIDENT_KEY
from lorikeet.serving.source import BlobSource
from lorikeet.settings import Settings
from lorikeet_engine.adapter import Residency
from lorikeet_engine.engine import Engine
from lorikeet_engine.errors import EngineError, StepFailed
from lorikeet_engine.loop import EngineLoop
from lorikeet_engine.request import Failed, Output, Request, Tokens

_ENCODERS = 2
_MOST_FAILED_STEPS = 5  # in a row: the device or the engine is broken, not a request


class Mailbox:
    """What the engine made for one request and nobody has taken yet. Lives on one event loop."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._filled = asyncio.Event()

    def put(self, output: Output) -> None:
        """Add an output and wake the taker."""
        self._outputs.append(output)
        self._filled.set()

    async def take(self) -> list[Output]:
        """Everything queued, at least one output."""
        await self._filled.wait()
        self._filled.clear()
        outputs, self._outputs = self._outputs, []
        return outputs


class Replica:
    """Serves one base model and any of its adapters.

    Tokenises, runs the engine in a thread of its own, detokenises, and forms the bytes that the
    client reads. Plain Python: `serving/app.py` makes it a deployment. Build it on the event loop
    that will call it.
    """

    def __init__(self, name: str, base_model: str, settings: Settings) -> None:
        self.name = name
        self._base_model = base_model
        source = BlobSource(open_store(settings.catalog))
        self._engine = Engine(engine_settings(settings, base_model), source)
        context = self._engine.config.max_context
        self._encoder = PromptEncoder(settings.base_models[base_model], context)
        # Long prompts take seconds to tokenise: never on the event loop, which every stream shares.
        self._encoding = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="encode")
        self._mailboxes: dict[str, Mailbox] = {}
        self._kept: dict[str, Keep] = {}
        self._failed_steps = 0
        self._event_loop = asyncio.get_running_loop()
        self._engine_loop = EngineLoop(self._engine, self._deliver)
        self._engine_loop.start()

    async def generate(self, call: Call) -> AsyncIterator[StreamItem]:
        """Answer one call: a Header, then bytes; or a Refusal at any point before the first byte.

        Closing the iterator aborts what is not finished and frees its KV pages and lease.
        """
        try:
            request = await self._event_loop.run_in_executor(self._encoding, self._request, call)
            found = self._engine.residency(call.adapter) if call.adapter else None
            self._engine.submit(request)
        except (EngineError, InvalidInput) as error:
            yield _refuse(error)
            return
        # Outputs come through this event loop, so none can arrive before its mailbox is there.
        mailbox = self._mailboxes[call.request_id] = Mailbox()
        answer = Answer(call, request.prompts, self._encoder.backend)
        try:
            yield Header(self.name, call.adapter.digest if call.adapter else None, found)
            while not answer.finished:
                for item in answer.take(await mailbox.take()):
                    yield item
                for choice in answer.stopped:
                    self._engine.abort(call.request_id, choice)
                answer.stopped.clear()
        finally:
            self._engine.abort(call.request_id)  # what has ended is left alone
            del self._mailboxes[call.request_id]

    async def apply_plan(self, plan: Plan) -> None:
        """Take this replica's part of the plan: pin what is new, unpin what is gone.

        A plan that does not name this replica was made without its report and changes nothing.
        """
        if self.name not in plan:
            return
        wanted = plan[self.name]
        for digest in self._kept.keys() - wanted.keys():
            self._engine.unpin(digest)
        for digest, keep in wanted.items():
            if digest not in self._kept or self._kept[digest].tier != keep.tier:
                self._engine.pin(keep.ref, keep.tier)
        self._kept = dict(wanted)

    async def report(self) -> ReplicaReport:
        """What this replica holds and does."""
        return ReplicaReport(self.name, self._base_model, self._engine.report())

    def record_routing_stats(self) -> dict[str, Any]:
        """What the router knows of this replica; Serve asks every second."""
        adapters = self._engine.report().adapters
        return {RESIDENT_KEY: [a.ref.digest for a in adapters if a.residency is Residency.GPU]}

    def check_health(self) -> None:
        """Raises when the engine's thread has ended, or when step after step fails."""
        if not self._engine_loop.alive:
            raise RuntimeError("the engine's loop ended")
        if self._failed_steps >= _MOST_FAILED_STEPS:
            raise RuntimeError(f"the engine's last {self._failed_steps} steps failed")

    def close(self) -> None:
        """Stop the engine. Safe to call twice."""
        self._engine_loop.close()

    def _request(self, call: Call) -> Request:
        prompts = self._encoder.encode(call)
        longest = max(map(len, prompts))
        room = max(1, self._engine.config.max_context - longest)
        sampling = replace(
            call.sampling,
            max_tokens=min(call.max_tokens, room) if call.max_tokens else room,
            min_tokens=min(call.min_tokens, room),
        )
        return Request(call.request_id, prompts, sampling, call.n, call.adapter, salt=call.tenant)

    def _deliver(self, outputs: list[Output]) -> None:
        self._event_loop.call_soon_threadsafe(self._sort, outputs)

    def _sort(self, outputs: list[Output]) -> None:
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.put(output)
        if any(isinstance(output, Tokens) for output in outputs):
            self._failed_steps = 0
        elif any(isinstance(o, Failed) and isinstance(o.error, StepFailed) for o in outputs):
            self._failed_steps += 1


def _refuse(error: EngineError | InvalidInput) -> Refusal:
    if isinstance(error, InvalidInput):
        return Refusal(error.code, error.message, error.param)
    return refusal_of(error)
