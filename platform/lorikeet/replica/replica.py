"""One engine behind Ray Serve: text in, the client's bytes out."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lorikeet.answer_stream.answer import Answer, refusal_of
from lorikeet.answer_stream.response_stream import DeltaGroup, ResponseStreams
from lorikeet.answer_stream.sender import AnswerSender
from lorikeet.catalog.store.object_store import open_store
from lorikeet.errors import GenerationFailed, InvalidInput
from lorikeet.logs import log_unexpected
from lorikeet.metrics.exposition import render
from lorikeet.metrics.replica import replica_metrics
from lorikeet.placement import pressure
from lorikeet.protocol.messages import AnswerHeader, Call, Refusal, SmokeResult, SmokeTest
from lorikeet.protocol.placement_decision import PinTarget, PlacementDecision
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.replica.engine_process import build_engine
from lorikeet.replica.grammar_sandbox import GrammarSandbox
from lorikeet.replica.metering import Metering
from lorikeet.replica.prompts import PromptEncoder, max_answer_tokens
from lorikeet.replica.smoke import run_smoke_test
from lorikeet.replica.status_feed import StatusFeed
from lorikeet.routing.status_update import StatusUpdate, to_stats
from lorikeet.settings import Settings
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import EngineClosed, EngineError, InvalidRequest, StepFailed
from lorikeet_engine.process.client import EngineProcessClient
from lorikeet_engine.request import Failed, Output, Request, Tokens
from lorikeet_engine.telemetry.status import EngineStatus

Receiver = Callable[[Output], object]
"""Takes one request's outputs on the event loop. Raises nothing."""

_ENCODERS = 2
_SHORT_PROMPT_TOKENS = 256
"""So much, about, is encoded in less time than threads wait beside a busy event loop."""
_LOOK_S = 0.1
_LATE_S = 2.0
"""An engine that owes an answer for so long may hang: gateways hear nothing that sounds well."""
_SUBMIT_S = 5.0
"""A request that the engine has not even taken by then goes to another replica."""
_DEAD_S = 60.0
"""An engine that owes an answer for so long will not give it."""
_TOLD_S = 90.0  # the controller tells all replicas everything twice a minute
_MOST_FAILED_STEPS = 5  # in a row: the device or the engine is broken, not a request


class Replica:
    """Serves one base model and any of its adapters.

    Tokenises, has the engine run in a process of its own, detokenises, and forms the bytes that the
    client reads. Plain Python: `serving/deployments.py` makes it a deployment. Build it on the
    event loop that will call it.
    """

    def __init__(self, name: str, base_model: str, settings: Settings) -> None:
        self.name = name
        self._base_model = base_model
        self._response_streams = ResponseStreams()
        self._receivers: dict[str, Receiver] = {}
        self._pins: dict[str, PinTarget] = {}
        self._sole_copies: float | None = None
        self._told_s: float | None = None
        self._failed_steps = 0
        self._stats: dict[str, Any] = {}
        self._event_loop = asyncio.get_running_loop()
        # Long prompts take seconds to tokenise: never on the event loop, which every stream shares.
        self._encoding = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="encode")
        store = self._encoding.submit(open_store, settings.catalog)  # beside the engine's start
        build = partial(build_engine, settings, base_model)
        self._engine = EngineProcessClient(
            build, self._deliver, self.engine_ended, self._status_changed
        )
        self._feed = StatusFeed(self._engine.status)
        context = self._engine.config.max_context
        self._encoder = PromptEncoder(settings.base_models[base_model], context)
        self._grammars = GrammarSandbox(settings.base_models[base_model])
        flush_s = settings.usage_flush_s
        self._metering = Metering(store.result(), self._engine, base_model, flush_s)

    async def generate(self, call: Call, gateway: str) -> AsyncIterator[Refusal | None]:
        """Answer one call; its gateway hears the answer among its `responses`.

        That is an AnswerHeader, then bytes; or a Refusal at any point before the first byte. This
        itself yields one item: None when all is on its way, else the Refusal of a call that the
        engine did not take, or that can reach its gateway no more. Closing it aborts what is not
        finished and frees its KV pages and lease.

        A stream of one item: of a plain result Serve says only with it which replica has taken the
        call, and of a stream with none gRPC may lose that word.
        """
        try:
            stream = await self._response_streams.to(gateway)
            request = await self._encoded(call)
            await self._grammars.check(call, request.sampling.grammar)
            with self._metering.measured(call, request.prompts) as meter:
                encoder = self._encoder
                answer = Answer(call, request.prompts, encoder.vocabulary, encoder.syntax)
                sender = AnswerSender(call, answer, meter, stream, self._engine.abort)
                with self._receiving(call.request_id, sender.take):
                    found = await self._submit(request)
                    digest = call.adapter.digest if call.adapter else None
                    sender.begin(AnswerHeader(self.name, digest, found, self._feed.update()))
                    await stream.wait_for(sender.ended)
            yield None
        except (EngineError, InvalidInput) as error:
            yield _refuse(error)
        except Exception as error:  # Serve would log its text, which may quote a prompt
            log_unexpected("generate_failed", call.request_id, error)
            raise GenerationFailed("the replica failed this request") from None

    async def responses(self, replica: str, gateway: str) -> AsyncIterator[list[DeltaGroup]]:
        """What the answers to a gateway's calls say, as it is made; until nobody takes it.

        replica: this one's name, by which the router found it.
        """
        assert replica == self.name
        with self._response_streams.opened(gateway) as stream:
            while not stream.closed.done():
                yield await stream.take()

    async def smoke(self, trial: SmokeTest) -> SmokeResult | Refusal:
        """Try an adapter beside the base model."""
        try:
            return await run_smoke_test(trial, self.name, self._encoder, self._tokens)
        except (EngineError, InvalidInput) as error:
            return _refuse(error)

    async def apply_plan(self, plan: Mapping[str, PlacementDecision]) -> str | None:
        """Take what was decided for this replica: pin, unpin, prefetch. Its name if that was said.

        A plan that does not name this replica changes nothing.
        """
        decision = plan.get(self.name)
        if decision is None:
            return None
        for digest in self._pins.keys() - decision.pins.keys():
            self._engine.unpin(digest)
        for digest, target in decision.pins.items():
            if digest not in self._pins or self._pins[digest].tier != target.tier:
                self._engine.pin(target.ref, target.tier)
        self._pins = dict(decision.pins)
        self._sole_copies, self._told_s = decision.sole_copies, time.monotonic()
        for each in decision.prefetches:
            self._engine.prefetch(each.ref, each.tier, each.uses)
        return self.name

    async def report(self, tier: Residency = Residency.DISK) -> ReplicaReport:
        """What this replica does, and its adapters: those at `tier` or nearer, or in the arena."""
        rows = await asyncio.wrap_future(self._engine.adapters(tier))
        return ReplicaReport(self.name, self._base_model, self._engine.status, rows)

    async def metrics(self) -> bytes:
        """What this replica measures, its part of the page of metrics. Raises EngineClosed."""
        if self._engine.silent_s > _LATE_S:
            raise EngineClosed("the engine does not answer: what it counts is not known")
        labels = {"base_model": self._base_model, "replica": self.name}
        return await asyncio.to_thread(render, replica_metrics(self._engine.status), labels)

    async def status_updates(self, replica: str) -> AsyncIterator[StatusUpdate]:
        """Where adapters are here and what the engine does, as it changes; for about a minute.

        replica: this one's name, by which the router found it.
        """
        assert replica == self.name
        async with aclosing(self._feed.follow()) as feed:
            async for update in feed:
                while self._engine.silent_s > _LATE_S:
                    await asyncio.sleep(_LOOK_S)
                yield update

    async def prefetch(self, wanted: Mapping[str, Mapping[AdapterRef, int]]) -> None:
        """Take this replica's part: bring adapters to the GPU for which requests wait at the door.

        wanted: by replica and adapter, how many requests. What is wanted less may give way.
        """
        for ref, requests in wanted.get(self.name, {}).items():
            self._engine.prefetch(ref, uses=requests)

    async def record_routing_stats(self) -> dict[str, Any]:
        """A status update; Serve asks every second, and passes it on although no feed is open."""
        if self._engine.silent_s < _LATE_S:
            self._stats = to_stats(self._feed.update_with_costs())
        return self._stats

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """How hard this replica works, for Serve's autoscaler and the controller."""
        told_s = self._told_s
        told_recently = told_s is not None and time.monotonic() - told_s < _TOLD_S
        sole_copies = self._sole_copies if told_recently else None
        seats = self._engine.config.step_costs.max_running
        return pressure.to_stats(pressure.measure_pressure(await self.report(), seats, sole_copies))

    def check_health(self) -> None:
        """Raises when the engine's process has ended or hangs, or when step after step fails."""
        if not self._engine.alive:
            raise RuntimeError("the engine's process ended")
        if self._engine.silent_s > _DEAD_S:
            raise RuntimeError(f"the engine has not answered for {_DEAD_S:g} s")
        if self._failed_steps >= _MOST_FAILED_STEPS:
            raise RuntimeError(f"the engine's last {self._failed_steps} steps failed")

    def engine_ended(self, error: EngineClosed) -> None:
        """The engine's process has ended by itself: every open request does too. Any thread."""
        self._event_loop.call_soon_threadsafe(self._fail_all, error)

    def close(self) -> None:
        """Write down what was used and stop the engine. Safe to call twice."""
        self._metering.close()
        self._grammars.close()
        self._engine.close()

    async def _encoded(self, call: Call) -> Request:
        """What the engine is asked. Raises InvalidInput, InvalidRequest."""
        if _is_short(call):
            return self._request(call)
        return await self._event_loop.run_in_executor(self._encoding, self._request, call)

    def _request(self, call: Call) -> Request:
        prompts = self._encoder.encode(call)
        room = max_answer_tokens(call, prompts, self._engine.config.max_context)
        sampling = replace(
            call.sampling,
            max_tokens=min(call.max_tokens, room) if call.max_tokens else room,
            min_tokens=min(call.min_tokens, room),
            grammar=self._encoder.grammar(call),
        )
        return Request(
            call.request_id, prompts, sampling, call.n, call.adapter, call.tenant, call.terms
        )

    async def _submit(self, request: Request) -> Residency | None:
        """Where its adapter was found. Raises EngineError."""
        submitted = asyncio.wrap_future(self._engine.submit(request))
        try:
            return await asyncio.wait_for(submitted, _SUBMIT_S)
        except TimeoutError as error:
            raise EngineClosed("the engine does not answer: send the request again") from error

    async def _tokens(self, request: Request) -> tuple[Residency | None, list[list[int]]]:
        """Where the adapter was found, and the tokens of every choice. Raises EngineError."""
        made: list[list[int]] = [[] for _ in range(len(request.prompts) * request.n)]
        unfinished = len(made)
        outputs = asyncio.Queue[Output]()
        with self._receiving(request.request_id, outputs.put_nowait):
            found = await self._submit(request)
            while unfinished:
                output = await outputs.get()
                if isinstance(output, Failed):
                    raise output.error
                made[output.choice].extend(output.token_ids)
                unfinished -= output.finish is not None
        return found, made

    @contextmanager
    def _receiving(self, request_id: str, receive: Receiver) -> Iterator[None]:
        """Until it is left the engine's outputs for a request go there.

        The request must be over by then; it is aborted if something was raised.
        """
        if request_id in self._receivers:
            raise InvalidRequest(
                f"request_id={request_id!r} is in flight: want a new one", param="request_id"
            )
        self._receivers[request_id] = receive
        try:
            yield
        except BaseException:
            self._engine.abort(request_id)  # what has ended is left alone
            raise
        finally:
            del self._receivers[request_id]

    def _deliver(self, outputs: list[Output]) -> None:
        self._event_loop.call_soon_threadsafe(self._sort, outputs)

    def _status_changed(self, status: EngineStatus) -> None:
        self._event_loop.call_soon_threadsafe(self._post, status)

    def _post(self, status: EngineStatus) -> None:  # on the event loop, so after the constructor
        self._feed.post(status)

    def _fail_all(self, error: EngineClosed) -> None:
        for request_id, receive in self._receivers.items():
            receive(Failed(request_id, error))

    def _sort(self, outputs: list[Output]) -> None:
        for output in outputs:
            receive = self._receivers.get(output.request_id)
            if receive is not None:
                receive(output)
        if any(isinstance(output, Tokens) for output in outputs):
            self._failed_steps = 0
        elif any(isinstance(o, Failed) and isinstance(o.error, StepFailed) for o in outputs):
            self._failed_steps += 1


def _is_short(call: Call) -> bool:
    """Whether it is read in a fraction of a millisecond; schemas may take long."""
    short = call.work.prompt_tokens <= _SHORT_PROMPT_TOKENS
    return short and call.tools is None and call.format is None


def _refuse(error: EngineError | InvalidInput) -> Refusal:
    if isinstance(error, InvalidInput):
        return Refusal(error.code, error.message, error.param)
    return refusal_of(error)
