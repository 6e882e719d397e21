"""The gateway's way to the engines: Ray Serve handles behind the API's own protocol."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from lorikeet.answer_stream.response_stream import DeltaGroup, ResponseBuffer, ResponseBuffers
from lorikeet.errors import GenerationFailed, LorikeetError, Unavailable
from lorikeet.logs import log_unexpected
from lorikeet.protocol.messages import (
    AnswerHeader,
    Attempt,
    Call,
    Refusal,
    SmokeResult,
    SmokeTest,
    StreamItem,
)
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.retry_after import NO_REPLICA_S
from lorikeet.routing.fleet import HEADER_AGE_S, Fleet
from lorikeet.serving.fleet_registry import fleet_of
from lorikeet.serving.push_delivery import PushDelivery
from lorikeet.serving.replica_calls import (
    REPLICA_LOST,
    ReplicaStreams,
    broadcast,
    is_being_cancelled,
    streaming_handle,
)
from lorikeet.serving.status_subscriber import StatusSubscriber
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import BaseCopy

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_LOAD_FAILED = "adapter_load_failed"
_LATE_S = 10.0
"""After its call has ended, an answer of which nothing comes for so long is lost."""


class ServeEngineClient:
    """The gateway's EngineClient (gateway/services.py): one Ray Serve handle for each base model.

    Build it on the event loop. gateway: this one's name, by which replicas know where answers go.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]], gateway: str) -> None:
        self._handles = handles
        self._deliveries = {name: PushDelivery(each) for name, each in handles.items()}
        self._run_call = {name: streaming_handle(each).run_call for name, each in handles.items()}
        self._gateway = gateway
        self._buffers = ResponseBuffers()
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._subscribe(handle)) for handle in handles.values()}

    async def stream_answer(self, base_model: str, call: Call) -> AsyncGenerator[StreamItem, None]:
        """Stream a replica's answer.

        `run_call` below is `Replica.run_call` (replica/replica.py) behind Serve, which asks
        serving/request_router.py for a replica. The answer comes back on the stream that
        `_subscribe` keeps open, into this call's ResponseBuffer. A replica that is lost before the
        answer's first byte is replaced by another, one that cannot load the adapter by one that has
        it, and one whose disk is full by any. Raises Unavailable when none answers,
        GenerationFailed when the replica's own code broke, or the answer or its end got lost on the
        way from a replica that lives.
        """
        run_call = self._run_call[base_model]
        fleet = _fleet(run_call)
        for attempt in range(_ATTEMPTS):
            # An id of its own: a lost replica may still be at work on the attempt before.
            again = replace(call, request_id=f"{call.request_id}-{attempt}") if attempt else call
            begun = False
            fleet.on_begun(again.request_id)
            sent_s = time.monotonic()
            try:
                async with aclosing(self._answer(run_call, fleet, again)) as items:
                    async for item in items:
                        if isinstance(item, AnswerHeader) and item.is_first:
                            yield _attempt(fleet, again.request_id, sent_s)
                        if attempt + 1 < _ATTEMPTS and _another_can_load(fleet, again, item):
                            raise Unavailable("the replica could not load the adapter")
                        if not begun and isinstance(item, bytes):
                            begun = True
                            fleet.on_first_bytes(again.request_id)
                        yield item
            except LorikeetError as error:
                yield _attempt(fleet, again.request_id, sent_s, error.message)
                if begun or not isinstance(error, Unavailable):
                    raise
            else:
                return
            finally:
                fleet.on_ended(again.request_id)
        raise Unavailable("no replica could answer", retry_after_s=NO_REPLICA_S)

    async def smoke(self, base_model: str, test: SmokeTest) -> SmokeResult | Refusal:
        """Run a smoke test on a replica. Raises Unavailable if lost, GenerationFailed if broken."""
        try:
            answer = await self._handles[base_model].smoke.remote(test)
            return cast("SmokeResult | Refusal", answer)
        except (RayTaskError, *REPLICA_LOST) as error:
            raise _translated(error, test.request_id) from error

    async def changed_copies(self, base_model: str, copies: Sequence[BaseCopy]) -> list[str]:
        """The modules whose copies a replica finds changed. Raises Unavailable if it is lost."""
        try:
            return cast("list[str]", await self._handles[base_model].changed_copies.remote(copies))
        except (RayTaskError, *REPLICA_LOST) as error:
            raise _translated(error, "changed_copies") from error

    async def deliver(self, base_model: str, ref: AdapterRef, blob: Path) -> bool:
        """Have all replicas keep an adapter on their hosts; whether all have it."""
        return await self._deliveries[base_model].deliver(ref, blob)

    async def expect(self, base_model: str, digest: str, blob: Path, size_bytes: int) -> None:
        """Let replicas of this machine pack a blob while it is written."""
        await self._deliveries[base_model].expect(digest, blob, size_bytes)

    async def holds(self, base_model: str, digest: str) -> bool:
        """Whether all replicas have an adapter on their hosts, or nearer."""
        return await self._deliveries[base_model].holds(digest)

    async def release(self, base_model: str, digest: str) -> None:
        """Let replicas evict an adapter again that was delivered."""
        await self._deliveries[base_model].release(digest)

    async def reports(self, tier: Residency = Residency.DISK) -> list[ReplicaReport]:
        """What every replica of every base model holds; one that does not answer is left out."""
        asked = (broadcast(handle, "report", tier) for handle in self._handles.values())
        return [report for some in await asyncio.gather(*asked) for report in some]

    def ready(self) -> bool:
        """Whether any replica of any base model has started, as far as Serve has said."""
        return any(_fleet(handle).replicas for handle in self._handles.values())

    async def _answer(
        self, run_call: DeploymentHandle[Any], fleet: Fleet, call: Call
    ) -> AsyncGenerator[StreamItem, None]:
        """One replica's answer. Raises Unavailable when it is lost or will not take the call.

        What is sent yields only that the call has ended, or the Refusal of one that was not taken.
        """
        request_id = call.request_id
        with self._buffers.opened(request_id) as buffer:
            sent: Any = run_call.remote(call, self._gateway)
            awaiting = asyncio.create_task(_await_call(sent, buffer))
            self._tasks.add(awaiting)
            awaiting.add_done_callback(self._tasks.discard)
            try:
                while items := await buffer.take():
                    for item in items:
                        if isinstance(item, Refusal) and item.code == Unavailable.code:
                            raise Unavailable(item.message)
                        if isinstance(item, AnswerHeader) and item.is_first:
                            _update_fleet(fleet, request_id, item)
                        yield item
            except RayTaskError as error:
                raise _translated(error, request_id) from error
            except (Unavailable, *REPLICA_LOST) as error:
                fleet.on_replica_lost(fleet.accepted_by(request_id))
                raise _translated(error, request_id) from error
            except asyncio.CancelledError as error:
                if is_being_cancelled():
                    raise
                fleet.on_replica_lost(fleet.accepted_by(request_id))
                raise Unavailable("the replica cancelled this request") from error
            finally:
                if not buffer.ended:  # else the call is about to end by itself
                    awaiting.cancel()
                    sent.cancel()

    async def _subscribe(self, handle: DeploymentHandle[Any]) -> None:
        """Subscribe to the status and the answers of one deployment's replicas.

        ReplicaStreams (replica_calls.py) keeps a stream from each replica open and hands on what
        comes: answers to `_buffers`, each to its call's.
        """

        def open_stream(replica: str) -> "DeploymentResponseGenerator[list[DeltaGroup]]":
            groups = streamed.response_stream.remote(replica=replica, gateway=self._gateway)
            return cast("DeploymentResponseGenerator[list[DeltaGroup]]", groups)

        def still_needed(replica: str) -> bool:
            return fleet.has_in_flight(replica) or buffers.awaits(replica)

        def on_too_large(replica: str) -> None:
            buffers.fail(replica, GenerationFailed("an answer was too large to be sent"))

        streamed, fleet, buffers = streaming_handle(handle), _fleet(handle), self._buffers
        answers = ReplicaStreams(
            fleet, open_stream, buffers.deliver, None, still_needed, on_too_large
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(StatusSubscriber(handle, fleet).run())
            tasks.create_task(answers.run())


async def _await_call(sent: AsyncIterable[Refusal | None], buffer: ResponseBuffer) -> None:
    """Await a call's end; fail its answer if the rest of that stops coming."""
    try:
        async for refusal in sent:
            if refusal is not None:
                buffer.put((refusal,), ended=True)
        received = -1
        while not buffer.ended and received < buffer.received:
            received = buffer.received
            await asyncio.sleep(_LATE_S)
        # Its own items may have broken the stream: made again, they would break the next one.
        buffer.fail(GenerationFailed("the end of the answer was lost"))
    except (Exception, asyncio.CancelledError) as error:
        buffer.fail(error)


def _attempt(fleet: Fleet, request_id: str, sent_s: float, failure: str | None = None) -> Attempt:
    """What is known of a call that was sent at sent_s."""
    decision, now_s = fleet.decision(request_id), time.monotonic()
    if decision is None or decision.accepted_s is None:
        candidates = decision.candidates if decision else ()
        return Attempt(request_id, None, now_s - sent_s, candidates, failure)
    waited_s = decision.accepted_s - sent_s
    return Attempt(request_id, decision.replica, waited_s, decision.candidates, failure)


def _another_can_load(fleet: Fleet, call: Call, item: StreamItem) -> bool:
    """Whether a replica could not load the adapter, but another has it or may load it."""
    if not isinstance(item, Refusal) or item.code != _LOAD_FAILED or call.adapter is None:
        return False
    full = fleet.accepted_by(call.request_id) if item.own_disk else None
    return fleet.on_load_failed(call.adapter.digest, full)


def _update_fleet(fleet: Fleet, request_id: str, header: AnswerHeader) -> None:
    """Update the fleet with what an answer's header says of its replica."""
    fleet.on_accepted(request_id, header.replica)  # Serve may say so later, on another stream
    if header.status is not None:
        fleet.on_status_update(header.replica, header.status, HEADER_AGE_S)
    if header.digest is not None and header.residency is not None:
        fleet.on_adapter_found(header.replica, header.digest, header.residency)


def _fleet(handle: DeploymentHandle[Any]) -> Fleet:
    return fleet_of(handle.app_name, handle.deployment_name)


def _translated(error: Exception, request_id: str) -> LorikeetError:
    """Ray's error as one of ours."""
    if isinstance(error, Unavailable):
        return error
    if isinstance(error, RayTaskError):
        log_unexpected("replica_broke", request_id, error)
        return GenerationFailed("the replica failed this request")
    return Unavailable(f"the replica was lost ({type(error).__name__}): send the request again")
