"""Client through which a gateway calls engine replicas, by Ray Serve handles."""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from lorikeet.errors import GenerationFailed, LorikeetError, ReplicasLost, Unavailable
from lorikeet.logs import log_unexpected
from lorikeet.parity.figures import Parity
from lorikeet.protocol.messages import (
    AnswerHeader,
    Attempt,
    EncodedCall,
    Refusal,
    Resumed,
    ResumeReason,
    SmokeResult,
    SmokeTest,
    StreamItem,
)
from lorikeet.protocol.parity import ParityTest
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.protocol.response_stream import (
    DeltaGroup,
    ResponseBuffer,
    ResponseBuffers,
    tokens_in,
)
from lorikeet.retry_after import NO_REPLICA_S
from lorikeet.routing.fleet import HEADER_AGE_S, Fleet, fleet_of
from lorikeet.serving.push_delivery import PushDelivery
from lorikeet.serving.replica_calls import (
    REPLICA_LOST,
    ReplicaStreams,
    broadcast,
    is_being_cancelled,
    is_too_large,
    streaming_handle,
)
from lorikeet.serving.status_subscriber import StatusSubscriber
from lorikeet.tenancy.token_bucket import TokenBucket
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import BaseCopy, WholeModule
from lorikeet_engine.errors import LoadFault

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_RESUMES_PER_MIN = 600
"""Most calls of one tenant per minute that a gateway sends again after a lost replica."""
_AT_ONCE_S = 5.0
"""A replica lost within these seconds of accepting a call may have been lost because of it."""
_SETTLE_S = 1.0
"""Seconds to wait before a call that may have caused a replica's loss is sent again.

Replicas that were lost at the same time from another cause then no longer accept the call.
"""
_PROGRESS_TOKENS = 32
"""A replica that has added this many tokens to an answer was not lost because of the call."""
_TAKE_OVER_S = 60.0
"""Seconds within which another replica must accept a call to continue its answer."""
_LEAVE_S = 10.0
"""Seconds after which an answer leaves a replica that is being stopped."""
_LEAVE_CHECK_S = 0.5
"""Seconds between two checks for replicas that are being stopped."""
_LOAD_FAILED = "adapter_load_failed"
_FIRST_ITEM_S = 10.0
"""Seconds after its call's end until an answer without an item counts as lost, if a stream that may
carry it has ended.
"""
_SILENCE_CHECK_S = 0.25
"""Seconds between two checks for silent replicas."""
_LATE_LOOP_S = 0.5
"""Seconds by which a check for silence may be late; a later one is skipped, since the event loop
has yet to read what replicas have sent.
"""

_REPLICAS_LOST = (
    "two replicas were lost just after they had taken this request, so it is sent to no third: it "
    "may be what ends them. Change it, or give the operators its id"
)
_CANCEL_S = 1.0
"""Seconds after which the task of a cancelled call is cancelled too, if Serve did not end it."""


class ServeEngineClient:
    """Client through which a gateway calls all base models' replicas, by Ray Serve handles.

    Implements EngineClient (gateway/services.py).

    Must be constructed on the event loop.

    handles: engine deployments' handles by base model.
    gateway: name of this gateway, under which replicas send it answers.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]], gateway: str) -> None:
        self._handles = handles
        self._deliveries = {name: PushDelivery(each) for name, each in handles.items()}
        self._run_call = {name: streaming_handle(each).run_call for name, each in handles.items()}
        self._gateway = gateway
        self._buffers = ResponseBuffers()
        self._resumes: dict[str, TokenBucket] = {}  # by tenant
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._subscribe(handle)) for handle in handles.values()}

    async def stream_answer(
        self, base_model: str, encoded: EncodedCall
    ) -> AsyncGenerator[StreamItem, None]:
        """Send a call to a replica and stream its answer.

        The call is `Replica.run_call` (replica/replica.py), sent through Serve, which asks
        serving/request_router.py for a replica. The answer comes back on the stream that
        `_subscribe` keeps open, into this call's ResponseBuffer.

        The call is sent to another replica in two cases:
        - Its replica is lost, silent (Fleet.take_silent) or being stopped, or gives the answer up;
          or the rest of the answer is lost (_await_call). Any other replica gets the log of the
          outputs so far and continues the answer.
        - Its replica cannot load the adapter, before the first byte. A replica that has the adapter
          begins the answer anew, as the weights may have been damaged; any replica does if the
          cause was a full disk.

        There are at most _ATTEMPTS attempts, besides those that left a replica that was being
        stopped.

        Closing this generator cancels the call, and the replica aborts the request. A client's
        disconnect is noticed in gateway/client_connection.py.

        Raises Unavailable if no replica answers; ReplicasLost if two replicas were lost just after
        they accepted the call, which may be the reason; GenerationFailed if the replica's code
        failed, or if the answer was too large to be sent.
        """
        run_call = self._run_call[base_model]
        course = _Course(_fleet(run_call), _seeded(encoded).to_send())
        for attempt in itertools.count():
            course.begin(attempt)
            try:
                async with self._sent(run_call, course) as buffer:
                    while items := await _taken(buffer, course):
                        for item in items:
                            if isinstance(item, bytes):
                                course.on_bytes()
                            elif isinstance(item, AnswerHeader) and item.is_first:
                                course.on_taken(item)
                                yield course.attempt()
                            elif isinstance(item, Refusal):
                                course.check(item)
                            yield item
                return
            except LorikeetError as error:
                yield course.attempt(error.message)
                if not isinstance(error, Unavailable):
                    raise
                resumed = await self._leave(course, error)
                if resumed is not None:
                    yield resumed
            finally:
                course.fleet.on_ended(course.sent.attempt_id)

    async def smoke(self, base_model: str, test: SmokeTest) -> SmokeResult | Refusal:
        """Run a smoke test (prompts with an adapter and without it) on a replica.

        Returns the replica's Refusal if the test cannot be completed.

        Raises Unavailable if the replica is lost, GenerationFailed if the replica's code failed.
        """
        try:
            answer = await self._handles[base_model].smoke.remote(test)
            return cast("SmokeResult | Refusal", answer)
        except (RayTaskError, *REPLICA_LOST) as error:
            raise _translated(error, test.request_id) from error

    async def parity(self, base_model: str, test: ParityTest) -> Parity | Refusal:
        """Let a replica compare its log-probabilities with those of an adapter's trainer.

        Returns the replica's Refusal if the trainer's token sequences cannot be scored.

        Raises Unavailable if the replica is lost, GenerationFailed if the replica's code failed.
        """
        try:
            answer = await self._handles[base_model].parity.remote(test)
            return cast("Parity | Refusal", answer)
        except (RayTaskError, *REPLICA_LOST) as error:
            raise _translated(error, test.request_id) from error

    async def changed_copies(self, base_model: str, copies: Sequence[BaseCopy]) -> list[str]:
        """Ask a replica for the modules whose copied matrices differ from the base model's.

        copies: matrices of the base model that an adapter carries along.

        Raises Unavailable if the replica is lost, GenerationFailed if the replica's code failed.
        """
        try:
            return cast("list[str]", await self._handles[base_model].changed_copies.remote(copies))
        except (RayTaskError, *REPLICA_LOST) as error:
            raise _translated(error, "changed_copies") from error

    async def changed_rows(
        self, base_model: str, modules: Sequence[WholeModule]
    ) -> dict[str, list[int]]:
        """Ask a replica for the rows of whole modules that differ from the base model's.

        modules: modules that an adapter has trained whole.

        Raises Unavailable if the replica is lost, GenerationFailed if the replica's code failed.
        """
        try:
            found = await self._handles[base_model].changed_rows.remote(modules)
            return cast("dict[str, list[int]]", found)
        except (RayTaskError, *REPLICA_LOST) as error:
            raise _translated(error, "changed_rows") from error

    async def deliver(self, base_model: str, ref: AdapterRef, blob: Path) -> bool:
        """Have all replicas hold an adapter in host memory; return True if all do.

        blob: file on this machine that holds the adapter.
        """
        return await self._deliveries[base_model].deliver(ref, blob)

    async def expect(self, base_model: str, digest: str, blob: Path, size_bytes: int) -> None:
        """Let the replicas on this machine pack (bring into the engine's layout) a pushed adapter
        while its file is still being written.

        digest: the adapter's SHA-256 as its client claims.
        blob: file that the gateway writes.
        size_bytes: size of the complete file.
        """
        await self._deliveries[base_model].expect(digest, blob, size_bytes)

    async def holds(self, base_model: str, digest: str) -> bool:
        """Return whether all replicas hold an adapter in host memory or on the GPU."""
        return await self._deliveries[base_model].holds(digest)

    async def release(self, base_model: str, digest: str) -> None:
        """Allow replicas to evict an adapter that `deliver` has put into their host memory."""
        await self._deliveries[base_model].release(digest)

    async def reports(self, tier: Residency = Residency.DISK) -> list[ReplicaReport]:
        """Return the reports of all replicas that answer, of all base models.

        tier: farthest tier from the GPU whose adapters the reports list.
        """
        asked = (broadcast(handle, "report", tier) for handle in self._handles.values())
        return [report for some in await asyncio.gather(*asked) for report in some]

    def ready(self) -> bool:
        """Return whether Serve has told this process of any replica of any base model."""
        return any(_fleet(handle).replicas for handle in self._handles.values())

    def max_context(self, base_model: str) -> int | None:
        """Return the maximum of prompt plus output tokens that every replica of a base model
        accepts.

        None: no replica has told this process its maximum.
        """
        return _fleet(self._handles[base_model]).max_context

    def _count_resume(self, tenant: str) -> None:
        """Count a call that is sent again after its replica was lost.

        Raises Unavailable if the tenant had too many within the last minute.
        """
        now_s = time.monotonic()
        if tenant not in self._resumes:
            full = [name for name, each in self._resumes.items() if not each.full_in_s(now_s)]
            for name in full:
                del self._resumes[name]
            bucket = TokenBucket("resumes", _RESUMES_PER_MIN, 60.0, 1.0, now_s)
            self._resumes[tenant] = bucket
        bucket = self._resumes[tenant]
        if wait_s := bucket.wait_s(1, 1.0, now_s):
            raise Unavailable(
                "too many requests of this tenant were lost with their replicas: send the request "
                "again",
                retry_after_s=wait_s,
            )
        bucket.count(1, now_s)

    async def _leave(self, course: "_Course", error: Unavailable) -> Resumed | None:
        """Prepare a call to be sent to another replica after an attempt has failed.

        Return the item that announces that the other replica continues the answer; None if the
        answer begins anew.

        course: state of the call, which is changed.
        error: failure of the attempt.

        Raises Unavailable if the call is sent to no other replica, ReplicasLost if two replicas
        were lost just after they accepted the call.
        """
        reason = error.reason if isinstance(error, _AnswerLost) else None
        replica = course.fleet.accepted_by(course.sent.attempt_id)
        course.left -= reason is not ResumeReason.DRAINED
        goes_on = course.left > 0 and len(course.log) > 0
        if course.begun and not goes_on:
            raise error
        if reason is not None and replica is not None:
            if reason is ResumeReason.REPLICA_LOST and course.may_be_at_fault():
                course.deaths_at_once += 1
                if course.deaths_at_once == 2:
                    raise ReplicasLost(_REPLICAS_LOST) from error
                await asyncio.sleep(_SETTLE_S)
            if reason is not ResumeReason.DRAINED:
                self._count_resume(course.sent.call.tenant)
            course.sent = replace(course.sent, lost=(*course.sent.lost, replica))
        if not course.left:
            raise Unavailable("no replica could answer", retry_after_s=NO_REPLICA_S) from error
        return Resumed(reason) if reason and replica and goes_on else None

    @asynccontextmanager
    async def _sent(
        self, run_call: DeploymentHandle[Any], course: "_Course"
    ) -> AsyncGenerator[ResponseBuffer, None]:
        """Send a call once, and cancel it at the context's end unless its answer has ended.

        The context's value is the ResponseBuffer of the answer. Items of the answer come from the
        stream that `_subscribe` keeps open to the replica. The Serve call's own stream carries none
        of them, but one object: None at the answer's end, or a Refusal if the replica cannot begin
        the answer or send it.

        The buffer fails with Unavailable if the call is to continue an answer that has begun, and
        no replica accepts it within _TAKE_OVER_S seconds.

        run_call: handle of the replicas' method `run_call`.
        course: state of the call.
        """
        encoded, begun, loop = course.sent, course.begun, asyncio.get_running_loop()
        id_, is_last = encoded.attempt_id, course.left == 1
        with self._buffers.opened(id_, course.log, begun=begun, is_last=is_last) as buffer:
            if begun:
                late = Unavailable("no replica took the answer over: send the request again")
                course.giving_up = loop.call_later(_TAKE_OVER_S, buffer.fail, late)
            sent: Any = run_call.remote(encoded, self._gateway)
            awaiting = asyncio.create_task(_await_call(sent, buffer))
            self._tasks.add(awaiting)
            awaiting.add_done_callback(self._tasks.discard)
            try:
                yield buffer
            finally:
                course.stop_giving_up()
                if not buffer.ended:  # else the call is about to end too
                    # Not the task first: grpc.aio keeps memory of a call that its task cancels.
                    sent.cancel()
                    loop.call_later(_CANCEL_S, awaiting.cancel)

    async def _subscribe(self, handle: DeploymentHandle[Any]) -> None:
        """Receive status updates and answers from all replicas of one deployment, until cancelled.

        ReplicaStreams (replica_calls.py) keeps one answer stream open from each replica, and passes
        its items to `_buffers`, which sorts them by call.
        """

        def open_stream(replica: str) -> "DeploymentResponseGenerator[list[DeltaGroup]]":
            groups = streamed.response_stream.remote(replica=replica, gateway=self._gateway)
            return cast("DeploymentResponseGenerator[list[DeltaGroup]]", groups)

        def still_needed(replica: str) -> bool:
            return fleet.has_in_flight(replica) or replica in buffers.awaited()

        def on_end(replica: str, error: BaseException | None) -> None:
            buffers.cut(replica)
            if is_too_large(error):  # the next stream would end at the same item
                buffers.fail(replica, GenerationFailed("an answer was too large to be sent"))

        streamed, fleet, buffers = streaming_handle(handle), _fleet(handle), self._buffers
        answers = ReplicaStreams(fleet, open_stream, buffers.deliver, None, still_needed, on_end)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(StatusSubscriber(handle, fleet).run())
            tasks.create_task(answers.run())
            tasks.create_task(_leave_silent_replicas(fleet, buffers))
            tasks.create_task(_leave_stopping_replicas(fleet, buffers))


async def _taken(buffer: ResponseBuffer, course: "_Course") -> list[StreamItem]:
    """Wait for new items of an answer, and return them; return an empty list at its end.

    buffer: received items of the answer.
    course: state of the call, in which the loss of a replica is recorded.

    Raises _AnswerLost if the replica is lost, Unavailable if no replica continues an answer that
    has begun, GenerationFailed if the replica's code failed or the answer was too large to be sent.
    """
    try:
        return await buffer.take()
    except RayTaskError as error:
        raise _translated(error, course.sent.attempt_id) from error
    except (Unavailable, *REPLICA_LOST) as error:
        course.on_lost()
        raise _translated(error, course.sent.attempt_id) from error
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        course.on_lost()
        reason = ResumeReason.REPLICA_LOST
        raise _AnswerLost("the replica cancelled this request", reason) from error


async def _leave_silent_replicas(fleet: Fleet, buffers: ResponseBuffers) -> None:
    """Move the answers of silent replicas (Fleet.take_silent) to others, again and again until
    cancelled; answers that cannot move stay.
    """
    while True:
        due_s = time.monotonic() + _SILENCE_CHECK_S
        await asyncio.sleep(_SILENCE_CHECK_S)
        if time.monotonic() - due_s > _LATE_LOOP_S:
            continue
        for replica, request_ids in fleet.take_silent().items():
            error = _AnswerLost("the replica sends no status", ResumeReason.SILENT)
            if moved := buffers.leave_calls(request_ids, error):
                facts = {"replica": replica, "moved_requests": moved}
                log.warning("replica_sends_no_status", extra=facts)


async def _leave_stopping_replicas(fleet: Fleet, buffers: ResponseBuffers) -> None:
    """Move answers from replicas that Serve no longer lists to others, _LEAVE_S seconds after that.

    Runs until cancelled.

    Serve removes a replica from its list before it stops it, and then waits for its calls. Nothing
    moves while Serve lists no other replica.
    """
    since_s: dict[str, float] = {}
    while True:
        await asyncio.sleep(_LEAVE_CHECK_S)
        listed, now_s = fleet.replicas, time.monotonic()
        stopping = buffers.awaited().difference(listed)
        since_s = {replica: since_s.get(replica, now_s) for replica in stopping}
        for replica in stopping:
            if listed and now_s - since_s[replica] >= _LEAVE_S:
                error = _AnswerLost("the replica is being stopped", ResumeReason.DRAINED)
                if moved := buffers.leave(replica, error):
                    facts = {"replica": replica, "moved_requests": moved}
                    log.info("answers_leave_replica", extra=facts)


async def _await_call(sent: AsyncIterable[Refusal | None], buffer: ResponseBuffer) -> None:
    """Wait for the end of a call, then fail its answer if the answer is lost, however late it is.

    The answer is lost if the stream of its first item ends before the answer. Without an item, the
    stream is not known: the answer is lost if a stream has begun or ended since the call was sent,
    and no item comes for _FIRST_ITEM_S seconds.

    Passes a Refusal, or the call's error, on to the buffer.
    """
    try:
        async for refusal in sent:
            if refusal is not None:
                buffer.put((refusal,), ended=True)
        lost = _AnswerLost("the end of the answer was lost", ResumeReason.REPLICA_LOST)
        buffer.end_call(lost)
        while not (buffer.received or buffer.ended):
            await asyncio.sleep(_FIRST_ITEM_S)
            if buffer.is_cut and not buffer.received:
                buffer.fail(lost)
    except (Exception, asyncio.CancelledError) as error:
        buffer.fail(error)


class _Course:
    """State of one call while it is sent to one replica after another, until one completes its
    answer.

    An attempt is one sending of the call to a replica.

    fleet: replicas of the base model.
    sent: the call, as its present attempt sends it.
    log: the engine's outputs for the answer so far, from which another replica can continue it.
    left: number of attempts left, with the present one.
    begun: whether the client has bytes of the answer.
    deaths_at_once: number of replicas that were lost just after they accepted the call, which may
        be the reason.
    giving_up: timer that fails an answer that no replica continues; None if there is none.
    """

    def __init__(self, fleet: Fleet, sent: EncodedCall) -> None:
        self.fleet, self.sent, self.log = fleet, sent, bytearray()
        self.left, self.begun, self.deaths_at_once = _ATTEMPTS, False, 0
        self.giving_up: asyncio.TimerHandle | None = None

    def begin(self, attempt: int) -> None:
        """Begin an attempt. attempt: number of attempts before it."""
        if attempt:
            log, made_tokens = bytes(self.log), tokens_in(self.log)
            self.sent = replace(self.sent, attempt=attempt, log=log, made_tokens=made_tokens)
        self.fleet.on_begun(self.sent.attempt_id)
        self._sent_s = self._taken_s = time.monotonic()
        self._has_bytes = False

    def on_taken(self, header: AnswerHeader) -> None:
        """Record that a replica has accepted the call, and its status and the adapter's tier.

        header: the answer's first header.
        """
        self.stop_giving_up()
        fleet, self._taken_s = self.fleet, time.monotonic()
        fleet.on_accepted(self.sent.attempt_id, header.replica)  # Serve's own notice may come later
        if header.status is not None:
            fleet.on_status_update(header.replica, header.status, HEADER_AGE_S)
        if header.digest is not None and header.residency is not None:
            fleet.on_adapter_found(header.replica, header.digest, header.residency)

    def stop_giving_up(self) -> None:
        """Stop the timer `giving_up`, if there is one."""
        if self.giving_up is not None:
            self.giving_up.cancel()
            self.giving_up = None

    def on_bytes(self) -> None:
        """Record that the replica has sent bytes of the answer."""
        self.begun = True
        if not self._has_bytes:
            self._has_bytes = True
            self.fleet.on_first_bytes(self.sent.attempt_id)

    def attempt(self, failure: str | None = None) -> Attempt:
        """Return the item that tells the answer's readers of the present attempt: its replica, wait
        and candidates.

        failure: error message; None: the replica has begun to answer.
        """
        request_id, now_s = self.sent.attempt_id, time.monotonic()
        decision = self.fleet.decision(request_id)
        if decision is None or decision.accepted_s is None:
            candidates = decision.candidates if decision else ()
            return Attempt(request_id, None, now_s - self._sent_s, candidates, failure)
        waited_s = decision.accepted_s - self._sent_s
        return Attempt(request_id, decision.replica, waited_s, decision.candidates, failure)

    def on_lost(self) -> None:
        """Record that the replica that accepted the call was lost."""
        self.fleet.on_replica_lost(self.fleet.accepted_by(self.sent.attempt_id))

    def check(self, refusal: Refusal) -> None:
        """Raise _AnswerLost if the replica gives the answer up, Unavailable if another replica can
        load the adapter that this one cannot.
        """
        if refusal.code == Unavailable.code:
            self.on_lost()
            raise _AnswerLost(refusal.message, ResumeReason.ENGINE_CLOSED)
        if self._another_can_load(refusal):
            raise Unavailable("the replica could not load the adapter")

    def _another_can_load(self, refusal: Refusal) -> bool:
        """Return whether to send the call again, as another replica can serve its adapter.

        False if `refusal` has another reason than a failed load, the client has bytes of the
        answer, or this attempt is the last. Otherwise the fleet is told of the failed load, and
        knows whether another replica can serve the adapter.

        If True, the outputs so far are dropped: the weights may have been damaged.
        """
        adapter = self.sent.call.adapter
        if self.begun or self.left == 1 or refusal.code != _LOAD_FAILED or adapter is None:
            return False
        if refusal.fault is LoadFault.ADAPTER:
            can_load = self.fleet.on_adapter_failed(adapter.digest)
        else:
            replica = self.fleet.accepted_by(self.sent.attempt_id)
            full = replica if refusal.fault is LoadFault.DISK else None
            can_load = self.fleet.on_load_failed(adapter.digest, full)
        if can_load:
            self.log.clear()
        return can_load

    def may_be_at_fault(self) -> bool:
        """Return True if the replica was lost within _AT_ONCE_S seconds after it accepted the call,
        and made fewer than _PROGRESS_TOKENS tokens.
        """
        progress = tokens_in(self.log) - self.sent.made_tokens >= _PROGRESS_TOKENS
        return time.monotonic() - self._taken_s < _AT_ONCE_S and not progress


class _AnswerLost(Unavailable):
    """A replica will not complete an answer, and another replica may."""

    def __init__(self, message: str, reason: ResumeReason) -> None:
        super().__init__(message)
        self.reason = reason


def _seeded(encoded: EncodedCall) -> EncodedCall:
    """Return a call with a seed if its tokens are sampled, so that each replica draws the same."""
    sampling = encoded.call.sampling
    if sampling.seed is not None or sampling.temperature == 0.0:
        return encoded
    sampling = replace(sampling, seed=secrets.randbits(63))
    return replace(encoded, call=replace(encoded.call, sampling=sampling))


def _fleet(handle: DeploymentHandle[Any]) -> Fleet:
    return fleet_of(handle.app_name, handle.deployment_name)


def _translated(error: Exception, request_id: str) -> LorikeetError:
    """Return the LorikeetError for an error of Ray.

    Any error of a lost replica becomes an _AnswerLost.
    """
    if isinstance(error, Unavailable):
        return error
    if isinstance(error, RayTaskError):
        log_unexpected("replica_broke", request_id, error)
        return GenerationFailed("the replica failed this request")
    lost = f"the replica was lost ({type(error).__name__}): send the request again"
    return _AnswerLost(lost, ResumeReason.REPLICA_LOST)
