"""Replica of one base model: token ids in, the client's bytes out."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lorikeet.apis.answer import Answer, refusal_of
from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.store.object_store import open_store
from lorikeet.errors import GenerationFailed, InvalidInput
from lorikeet.logs import log_unexpected
from lorikeet.metrics.exposition import render
from lorikeet.metrics.replica import replica_metrics
from lorikeet.parity.figures import Parity
from lorikeet.placement import pressure
from lorikeet.placement.learned_prompts import Found, SharedPrefixes
from lorikeet.protocol.messages import (
    AnswerHeader,
    EncodedCall,
    Refusal,
    SmokeResult,
    SmokeTest,
)
from lorikeet.protocol.parity import ParityTest
from lorikeet.protocol.placement_decision import PinTarget, PlacementDecision
from lorikeet.protocol.pushing import HoldState, PushMessage
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.protocol.response_stream import DeltaGroup, ResponseStreams, outputs_of
from lorikeet.protocol.status_update import StatusUpdate, to_stats
from lorikeet.replica.answer_sender import AnswerSender
from lorikeet.replica.base_copies import changed_copies, changed_rows
from lorikeet.replica.engine_process import build_engine
from lorikeet.replica.parity import prove_parity
from lorikeet.replica.pinned_prompts import PinnedPrompts
from lorikeet.replica.pushed_adapters import PushedAdapters
from lorikeet.replica.request_builder import RequestBuilder
from lorikeet.replica.slot_metering import SlotMetering
from lorikeet.replica.smoke import Completions, run_smoke_test
from lorikeet.replica.status_feed import StatusFeed
from lorikeet.settings import Settings
from lorikeet.text.prompts import PromptEncoder
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import BaseCopy, WholeModule
from lorikeet_engine.errors import (
    EngineClosed,
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    StepFailed,
)
from lorikeet_engine.process.client import EngineProcessClient
from lorikeet_engine.request import Failed, Output, PromptLogprobs, Request, Tokens
from lorikeet_engine.telemetry.status import EngineStatus

_POLL_S = 0.1
_STALLED_S = 1.0
"""Seconds without a sign of life of the engine after which gateways get no status updates.

The engine may hang: gateways that get no updates send its requests and answers to other replicas.
"""
_SUBMIT_S = 5.0
"""Seconds without a sign of life of the engine after which a request that it has not accepted
fails, so that the gateway sends it to another replica.

An engine that is only busy is not silent, and accepts the request from its queue in time.
"""
_AGAIN_S = 0.5
"""Seconds before a request that goes on with an answer is submitted to a busy engine again."""
_DEAD_S = 60.0
"""Seconds without a sign of life of the engine after which the replica is unhealthy."""
_PLAN_FRESH_S = 90.0  # the controller sends each replica its whole plan twice a minute
_REPLAYED_AT_ONCE = 64
"""Number of outputs of a lost replica that are converted in one callback of the event loop."""
_MOST_FAILED_STEPS = 5  # in a row: the device or the engine is broken, not a request

Receiver = Callable[[Output], object]
"""Function that takes one output of a request. It is called on the event loop and raises
nothing.
"""


class Replica:
    """Server of one base model and its adapters.

    It runs the engine in a separate process, detokenises outputs and formats the bytes that the
    client reads. Plain Python: `serving/deployments.py` makes it a deployment.
    Construct it on the event loop that will call it.
    """

    def __init__(self, name: str, base_model: str, settings: Settings) -> None:
        self.name = name
        self._base_model, self._folder = base_model, settings.base_models[base_model]
        self._response_streams = ResponseStreams()
        self._blobs, self._explaining = settings.cache_dir, asyncio.Lock()
        self._pins: dict[str, PinTarget] = {}
        self._sole_copies: float | None = None
        self._plan_s: float | None = None
        self._stats: dict[str, Any] = {}
        self._event_loop = asyncio.get_running_loop()
        self._outputs = OutputDispatcher()
        opening = ThreadPoolExecutor(1, thread_name_prefix="open-store")
        store = opening.submit(open_store, settings.catalog)  # while the engine starts
        opening.shutdown(wait=False)
        build = partial(build_engine, settings, base_model)
        self._engine = EngineProcessClient(
            build, self._outputs.dispatch, self.engine_ended, self._status_changed
        )
        info = self._engine.info
        self._feed = StatusFeed(self._engine.status, info.max_context, info.kv_tokens)
        self._pushed = PushedAdapters(
            settings.cache_dir, self._engine, self._feed.residency, lambda at: self._pins.get(at)
        )
        context = self._engine.info.max_context
        self._encoder = PromptEncoder(settings.base_models[base_model])
        self._requests = RequestBuilder(self._encoder, settings.base_models[base_model], context)
        self._prefixes = SharedPrefixes(settings.learned_prompts)
        self._prompts = PinnedPrompts(self._encoder, self._engine, self._complete)
        flush_s = settings.usage_flush_s
        self._store = store.result()
        self._metering = SlotMetering(self._store, self._engine, base_model, flush_s)

    async def run_call(self, encoded: EncodedCall, gateway: str) -> AsyncIterator[Refusal | None]:
        """Answer one call; its gateway reads the answer from `response_stream`.

        An answer is two AnswerHeaders and then bytes; if the answer fails, a Refusal replaces the
        items that are missing. Closing this generator aborts an unfinished request and frees its KV
        pages and its lease of the adapter (which keeps it on the GPU).

        A call with a log (the outputs of replicas that were lost with it) goes on with their
        answer: the items before the log's end, which the client has, are not sent again.

        Yields one item: None once the whole answer is in the gateway's stream, or the Refusal of a
        call that the engine did not accept or whose answer cannot reach its gateway.

        gateway: name of the gateway that sent the call.
        """
        call = encoded.call
        try:
            stream = await self._response_streams.to(gateway)
            prepared = await self._requests.build(encoded)
            request = prepared.request
            if call.embedder is None:
                asked_s = time.monotonic()
                self._prefixes.count(call.adapter, call.tenant, request.prompts[0], asked_s)
            encoder = await self._requests.encoder_of(encoded)
            known = (encoder.vocabulary, encoder.syntax, prepared.thinking, prepared.echoes)
            checked = bool(prepared.checked)
            answer = Answer(call, request.prompts, *known, checked=checked, tags=encoder.think_tags)
            request_id, abort = encoded.attempt_id, self._engine.abort
            sender = AnswerSender(call, request_id, answer, request.prompts, stream, abort)
            made = await _replay(encoded, answer, sender) if encoded.log else ()
            with self._outputs.receiving(request_id, sender.take, abort):
                found, goes_on = None, any(answer.unended)
                if goes_on:
                    found = await self._submit(_rest_of(request, made) if made else request)
                digest = call.adapter.digest if call.adapter else None
                ignored, status = prepared.ignored, self._feed.update()
                sender.begin(AnswerHeader(self.name, digest, found, status, ignored=ignored))
                if goes_on:
                    await stream.wait_for(sender.ended)
            if answer.awaits_checks:
                said = answer.said()
                sender.end(await self._requests.check(call, prepared.checked, said))
            yield None
        except (EngineError, InvalidInput) as error:
            yield _refuse(error)
        except Exception as error:  # Serve would log its message, which may quote a prompt
            log_unexpected("generate_failed", call.request_id, error)
            raise GenerationFailed("the replica failed this request") from None

    async def response_stream(self, replica: str, gateway: str) -> AsyncIterator[list[DeltaGroup]]:
        """Yield an empty list, then new items of the answers to a gateway's calls, until the stream
        is closed.

        replica: name of this replica as the router knows it.
        gateway: name of the gateway.
        """
        assert replica == self.name
        with self._response_streams.opened(gateway) as stream:
            yield []
            while not stream.closed:
                yield await stream.take()

    async def smoke(self, test: SmokeTest) -> SmokeResult | Refusal:
        """Run a smoke test (a few prompts with the adapter and without it); return a Refusal if the
        test cannot be completed.
        """
        try:
            encoder = await asyncio.to_thread(self._encoder.with_vocabulary, test.tokenizer)
            return await run_smoke_test(test, self.name, encoder.backend.decode, self._complete)
        except (EngineError, InvalidInput) as error:
            return _refuse(error)

    async def parity(self, test: ParityTest) -> Parity | Refusal:
        """Compare this replica's log-probabilities with those of an adapter's trainer.

        Returns a Refusal if the probes (the trainer's token sequences) cannot be scored.
        """
        try:
            at = self._blobs, self._fetch_blob
            return await prove_parity(test, self._engine.info, *at, self._explaining, self._scores)
        except (EngineError, InvalidInput) as error:
            return _refuse(error)

    async def changed_copies(self, copies: Sequence[BaseCopy]) -> list[str]:
        """Return the modules whose copied matrices differ from the base model's own.

        copies: an adapter's copies of matrices of the base model.
        """
        return await asyncio.to_thread(changed_copies, self._folder, copies)

    async def changed_rows(self, modules: Sequence[WholeModule]) -> dict[str, list[int]]:
        """Return the rows of an adapter's whole modules that differ from the base model's, by
        module.
        """
        return await asyncio.to_thread(changed_rows, self._folder, modules)

    async def apply_plan(self, plan: Mapping[str, PlacementDecision]) -> str | None:
        """Pin, unpin and prefetch adapters as the plan says; return this replica's name.

        plan: the controller's decisions by replica name. If the plan lacks this replica, nothing
            changes and the result is None.
        """
        decision = plan.get(self.name)
        if decision is None:
            return None
        for digest in self._pins.keys() - decision.pins.keys():
            self._engine.unpin(digest)
            self._pushed.unpinned(digest)
        for digest, target in decision.pins.items():
            held = self._pins.get(digest)
            if held is None or (held.tier, held.draft) != (target.tier, target.draft):
                self._engine.pin(target.ref, target.tier, draft=target.draft)
        self._pins = dict(decision.pins)
        self._prompts.update(decision.pins.values(), decision.learned)
        self._sole_copies, self._plan_s = decision.sole_copies, time.monotonic()
        for each in decision.prefetches:
            self._engine.prefetch(each.ref, each.tier, each.uses)
        return self.name

    async def push(self, message: PushMessage) -> HoldState:
        """Do what a gateway's message asks for a pushed adapter; return the adapter's state on this
        replica.
        """
        return await self._pushed.answer(message)

    async def report(self, tier: Residency = Residency.DISK) -> ReplicaReport:
        """Return the engine's status, and the adapters that are at `tier` or nearer to the GPU.

        Adapters in the GPU's arena (its memory for adapters) are always included.
        """
        rows = await asyncio.wrap_future(self._engine.adapters(tier))
        status, info = self._engine.status, self._engine.info
        return ReplicaReport(
            self.name,
            self._base_model,
            status,
            rows,
            info.quantization,
            info.fp8_kv,
            self._prompts.progress(),
        )

    async def take_prefixes(self) -> Found:
        """Return the beginnings that prompts of each adapter have shared since the last call."""
        return self._prefixes.take(time.monotonic())

    async def metrics(self) -> bytes:
        """Return this replica's metrics page. Raises EngineClosed if the engine hangs."""
        if self._engine.silent_s > _SUBMIT_S:
            raise EngineClosed("the engine does not answer, so its counters are unknown")
        labels = {"base_model": self._base_model, "replica": self.name}
        found = replica_metrics(self._engine.status, self._engine.info)
        return await asyncio.to_thread(render, found, labels)

    async def status_updates(self, replica: str) -> AsyncIterator[StatusUpdate]:
        """Yield changes of adapters' tiers and of the engine's load, for about a minute.

        replica: name of this replica as the router knows it.
        """
        assert replica == self.name
        async with aclosing(self._feed.subscribe()) as feed:
            async for update in feed:
                while self._engine.silent_s > _STALLED_S:
                    await asyncio.sleep(_POLL_S)
                yield update

    async def prefetch(self, wanted: Mapping[str, Mapping[AdapterRef, int]]) -> None:
        """Prefetch to the GPU the adapters of requests in Serve's pending queue.

        wanted: number of waiting requests, by replica name and adapter. An adapter with more
            requests may evict an adapter with fewer.
        """
        for ref, requests in wanted.get(self.name, {}).items():
            self._engine.prefetch(ref, uses=requests)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return a status update for gateways; the last one again while the engine is silent.

        Serve calls this method each second, and delivers the update even to gateways without a
        status stream.
        """
        if self._engine.silent_s < _STALLED_S:
            self._stats = to_stats(self._feed.update_with_costs())
        return self._stats

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this replica's load for Serve's autoscaler and the controller."""
        plan_s = self._plan_s
        is_fresh = plan_s is not None and time.monotonic() - plan_s < _PLAN_FRESH_S
        sole_copies = self._sole_copies if is_fresh else None
        max_running = self._engine.info.step_costs.max_running
        return pressure.to_stats(
            pressure.measure_pressure(await self.report(), max_running, sole_copies)
        )

    def check_health(self) -> None:
        """Raise RuntimeError if the engine's process ended or hangs, or if its last
        _MOST_FAILED_STEPS steps failed.
        """
        if not self._engine.alive:
            raise RuntimeError("the engine's process ended")
        if self._engine.silent_s > _DEAD_S:
            raise RuntimeError(f"the engine has not answered for {_DEAD_S:g} s")
        if self._outputs.failed_steps >= _MOST_FAILED_STEPS:
            raise RuntimeError(f"the engine's last {self._outputs.failed_steps} steps failed")

    def engine_ended(self, error: EngineClosed) -> None:
        """Fail all running requests after the engine's process has ended by itself. Callable from
        any thread.
        """
        self._outputs.fail_all(error)

    def close(self) -> None:
        """Write the usage of GPU slots and adapter loads to the store, then stop the engine.

        Safe to call twice.
        """
        self._metering.close()
        self._prompts.close()
        self._requests.close()
        self._engine.close()

    async def _submit(self, request: Request) -> Residency | None:
        """Submit a request to the engine; return the tier at which its adapter was found, None for
        the base model. A request that goes on with an answer waits while the engine is overloaded.

        Raises EngineError if the engine refuses the request or does not answer.
        """
        while True:
            try:
                return await self._submit_once(request)
            except EngineOverloaded:
                if not request.made:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def _submit_once(self, request: Request) -> Residency | None:
        submitted = asyncio.wrap_future(self._engine.submit(request))
        try:
            while not submitted.done():
                await asyncio.wait({submitted}, timeout=_SUBMIT_S)
                if not submitted.done() and self._engine.silent_s > _SUBMIT_S:
                    raise EngineClosed("the engine does not answer: send the request again")
            return submitted.result()
        finally:
            submitted.cancel()

    async def _complete(self, request: Request) -> Completions:
        """Run a request to its end; return its tokens. Raises EngineError if the request fails."""
        tokens: list[list[int]] = [[] for _ in range(len(request.prompts) * request.n)]

        def take(output: Output) -> None:
            if isinstance(output, Tokens):
                tokens[output.choice].extend(output.token_ids)

        return Completions(await self._run(request, take), tokens)

    async def _scores(self, request: Request) -> list[list[float]]:
        """Run a request to its end; return the log-probabilities of each prompt's tokens, from the
        second to the last. Raises EngineError if the request fails.
        """
        scores: list[list[float]] = [[] for _ in request.prompts]

        def take(output: Output) -> None:
            if isinstance(output, PromptLogprobs):
                scores[output.choice // request.n] += [each.logprob for each in output.logprobs]

        await self._run(request, take)
        return scores

    def _fetch_blob(self, ref: AdapterRef, path: Path) -> None:
        self._store.download(blob_key(ref.digest), path)

    async def _run(self, request: Request, take: Callable[[Output], None]) -> Residency | None:
        """Run a request to its end, and pass its outputs to `take`; return the tier at which its
        adapter was found. Raises EngineError if the request fails.
        """
        unfinished = len(request.prompts) * request.n
        outputs = asyncio.Queue[Output]()
        receive, abort = outputs.put_nowait, self._engine.abort
        with self._outputs.receiving(request.request_id, receive, abort):
            found = await self._submit(request)
            while unfinished:
                output = await outputs.get()
                if isinstance(output, Failed):
                    raise output.error
                take(output)
                unfinished -= isinstance(output, Tokens) and output.finish is not None
        return found

    def _status_changed(self, status: EngineStatus) -> None:
        self._event_loop.call_soon_threadsafe(self._post, status)

    def _post(self, status: EngineStatus) -> None:  # on the event loop, so after the constructor
        self._feed.post(status)


class OutputDispatcher:
    """Dispatcher of the engine's outputs to running requests by id. For one event loop.

    failed_steps: number of consecutive failed steps of the engine since its last step with tokens.
    """

    def __init__(self) -> None:
        self.failed_steps = 0
        self._event_loop = asyncio.get_running_loop()
        self._receivers: dict[str, Receiver] = {}

    @contextmanager
    def receiving(
        self, request_id: str, receive: Receiver, abort: Callable[[str], object]
    ) -> Iterator[None]:
        """Give `receive` the engine's outputs for a request until the context ends.

        The caller leaves the context after the request's last output. Raises InvalidRequest if
        another running request has the id.

        abort: called with the request's id if the context ends by an exception.
        """
        if request_id in self._receivers:
            raise InvalidRequest(
                f"request_id={request_id!r} is in flight: want a new one", param="request_id"
            )
        self._receivers[request_id] = receive
        try:
            yield
        except BaseException:
            abort(request_id)  # no effect on choices that have ended
            raise
        finally:
            del self._receivers[request_id]

    def dispatch(self, outputs: list[Output]) -> None:
        """Hand the outputs of one engine step to their requests' receivers. Callable from any
        thread.
        """
        self._event_loop.call_soon_threadsafe(self._dispatch, outputs)

    def fail_all(self, error: EngineClosed) -> None:
        """Give an error to the receivers of all running requests. Callable from any thread."""
        self._event_loop.call_soon_threadsafe(self._fail_all, error)

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            receive = self._receivers.get(output.request_id)
            if receive is not None:
                receive(output)
        if any(isinstance(output, Tokens) for output in outputs):
            self.failed_steps = 0
        elif any(isinstance(o, Failed) and isinstance(o.error, StepFailed) for o in outputs):
            self.failed_steps += 1

    def _fail_all(self, error: EngineClosed) -> None:
        for request_id, receive in self._receivers.items():
            receive(Failed(request_id, error))


async def _replay(
    encoded: EncodedCall, answer: Answer, sender: AnswerSender
) -> tuple[tuple[int, ...] | None, ...]:
    """Feed an answer the outputs that lost replicas made for it (the call's log).

    Returns the tokens of each choice so far, None for a choice that has ended.

    Other tasks of the event loop run meanwhile: a token takes some 20 µs.
    """
    made: list[list[int]] = [[] for _ in answer.unended]
    for count, output in enumerate(outputs_of(encoded.log, encoded.attempt_id)):
        sender.replay(output)
        made[output.choice] += output.token_ids
        if count % _REPLAYED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return tuple(
        tuple(tokens) if goes_on else None
        for tokens, goes_on in zip(made, answer.unended, strict=True)
    )


def _rest_of(request: Request, made: tuple[tuple[int, ...] | None, ...]) -> Request:
    """Return the request for the rest of an answer, without limits on the wait for its beginning.

    made: tokens that other replicas made for each choice; None for a choice that has ended.
    """
    scheduling = replace(request.scheduling, max_queue_s=None, max_load_s=None)
    return replace(request, scheduling=scheduling, made=made)


def _refuse(error: EngineError | InvalidInput) -> Refusal:
    if isinstance(error, InvalidInput):
        return Refusal(error.code, error.message, error.param)
    return refusal_of(error)
