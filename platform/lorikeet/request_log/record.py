"""Record of one request, and the trace that writes it.

A record has numbers and names, never a prompt or an answer. why.py, ui/ and tracing/ read records;
only RequestTrace writes them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from starlette.requests import ClientDisconnect

from lorikeet.errors import LorikeetError, Unavailable, status_of
from lorikeet.protocol.messages import (
    AnswerHeader,
    Attempt,
    Call,
    Candidate,
    FinalUsage,
    Refusal,
    Resumed,
    ResumeReason,
    StreamItem,
    TokenIds,
)
from lorikeet_engine.adapter import Adapter, AdapterRef, Residency
from lorikeet_engine.request import DraftCounts, EngineTimings

_REFUSALS = {"overloaded", "adapter_not_ready"}
"""Codes with status 503 whose requests count as refused, not as failed."""
_SHOWN_MODEL = 200  # characters kept of a name, which may be any text


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """Attempt of one replica to answer a request.

    request_id: the attempt's own id.
    replica: None if no replica took the call.
    taken_s, failed_s: seconds from the request's arrival until the replica took the call, and until
        the attempt failed; None if that did not happen.
    failure: reason of the failure; None without one.
    candidates: replicas that the router considered, the best first.
    """

    request_id: str
    replica: str | None
    taken_s: float | None
    failure: str | None
    candidates: tuple[Candidate[str], ...]
    failed_s: float | None


@dataclass(frozen=True, slots=True)
class EndedStage:
    """Ended stage of a request that generates nothing, such as a push.

    at_s: end of the stage, seconds since the request's arrival.
    """

    name: str
    at_s: float


@dataclass(slots=True)
class RequestRecord:
    """Known facts of one request. Times are seconds since `received`.

    method, path, traceparent: method, path and header of the HTTP request; traceparent names the
        caller's own trace.
    received: arrival, Unix seconds.
    tenant: None until the key is checked.
    model: name as the client wrote it.
    base_quantization: quantization of the base model's linears.
    trained_on: name that the adapter's files give its base model.
    invoked: whether a prompt has the invocation tokens of an activated LoRA; None for others.
    validated_s: end of the checks, when the request was sent on.
    accepted_s: arrival of a replica's message that its engine has the request.
    first_byte_s: arrival of the answer's first bytes.
    until_s: end of the request, or now if it runs.
    code, param: code and field of the error that ended the request.
    replica, residency, load_s: answering replica, tier at which it found the adapter, and seconds
        of the adapter's load, from the AnswerHeader.
    running, waiting: numbers of sequences on the replica that decode, and that wait or compute
        their prompt, from the AnswerHeader.
    attempts: attempts of replicas, in order.
    resumed: reasons why other replicas went on with the answer, in order.
    usage: None unless the answer is complete.
    ended_stages: stages of a push, in order.
    background: whether the request gets what others leave: a line of a batch, or service_tier flex.
    """

    request_id: str
    path: str
    traceparent: str | None
    received: float
    tenant: str | None = None
    key_id: str | None = None
    model: str | None = None
    base_model: str | None = None
    base_quantization: str | None = None
    trained_on: str | None = None
    adapter: Adapter | None = None
    invoked: bool | None = None
    stream: bool = False
    validated_s: float | None = None
    accepted_s: float | None = None
    first_byte_s: float | None = None
    until_s: float = 0.0
    ended: bool = False
    code: str | None = None
    param: str | None = None
    replica: str | None = None
    residency: Residency | None = None
    load_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    resumed: tuple[ResumeReason, ...] = ()
    usage: FinalUsage | None = None
    method: str = "POST"
    ended_stages: tuple[EndedStage, ...] = ()
    background: bool = False

    @property
    def outcome(self) -> str:
        """Outcome: running, finished, refused, failed, or cancelled if the client left."""
        if not self.ended:
            return "running"
        if self.code is not None:
            refused = status_of(self.code) < 500 or self.code in _REFUSALS
            return "refused" if refused else "failed"
        return "cancelled" if self.usage is None else "finished"

    @property
    def timings(self) -> tuple[EngineTimings, ...]:
        """Timings of each of the answer's choices; empty unless the answer is complete."""
        return self.usage.timings if self.usage else ()

    @property
    def slowest(self) -> EngineTimings | None:
        """Timings of the choice that spent the longest time in the engine; None without timings."""
        return max(self.timings, key=engine_s, default=None)

    @property
    def drafts(self) -> tuple[DraftCounts, ...]:
        """Numbers of drafted (speculative) and of accepted tokens of all choices, by source of the
        drafts; () without any.
        """
        each = [counts for timings in self.timings for counts in timings.drafts]
        return tuple(
            DraftCounts(
                source,
                sum(counts.drafted for counts in each if counts.source is source),
                sum(counts.accepted for counts in each if counts.source is source),
            )
            for source in dict.fromkeys(counts.source for counts in each)
        )

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token: measured for a stream, else estimated from the
        slowest choice's timings; None if unknown.
        """
        slowest = self.slowest
        if self.stream or slowest is None:
            return self.first_byte_s if self.stream else None
        return max(0.0, self.until_s - slowest.decode_s)

    @property
    def retries(self) -> int:
        """Number of attempts that failed."""
        return sum(attempt.failure is not None for attempt in self.attempts)


def engine_s(timings: EngineTimings) -> float:
    """Return the seconds that a choice spent in the engine: queued, in prefill and in decode."""
    return timings.queued_s + timings.prefill_s + timings.decode_s


class RequestTrace:
    """Writer of one request's record; a RequestObserver that sees each item of the answer.

    Constructor arguments:
    running: called with this trace when the request is sent to a replica.
    ended: called with the record when the request ends.
    """

    def __init__(
        self,
        request_id: str,
        running: Callable[["RequestTrace"], None],
        ended: Callable[[RequestRecord], None],
        path: str,
        traceparent: str | None,
        method: str,
    ) -> None:
        self._record = RequestRecord(request_id, path, traceparent, time.time(), method=method)
        self._running, self._ended = running, ended
        self._received_s = time.monotonic()
        self._sent_s = 0.0  # begin of the last attempt
        self._attempts: dict[str, AttemptRecord] = {}

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._record.request_id

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Context in which the request is read and checked. An error in it ends the request's
        record.
        """
        try:
            yield
        except Exception as error:
            self._end(error)
            raise

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Context in which a request is answered that needs no replica. Leaving it ends the
        request's record.
        """
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise
        self._record.usage = FinalUsage(0, 0, 0)
        self._end(None)

    def set_caller(self, tenant: str, key_id: str) -> None:
        """Record the tenant and its key."""
        self._record.tenant, self._record.key_id = tenant, key_id

    def set_model(self, model: str) -> None:
        """Record the model as the client wrote it."""
        self._record.model = model[:_SHOWN_MODEL]

    def end_stage(self, name: str, at_s: float | None = None) -> None:
        """Record that the stage `name` of a push has ended.

        at_s: time.monotonic() at its end; None: now.
        """
        ended = EndedStage(name, (at_s or time.monotonic()) - self._received_s)
        self._record.ended_stages += (ended,)

    def set_call(
        self, call: Call, base_model: str, quantization: str | None, trained_on: str | None
    ) -> None:
        """Record the adapter and base model of the request.

        base_model: name of the served base model.
        quantization: quantization of the base model's linears; None without one.
        trained_on: name that the adapter's files give its base model; None if unknown.
        """
        record = self._record
        record.adapter, record.stream, record.base_model = call.adapter, call.stream, base_model
        record.base_quantization, record.trained_on = quantization, trained_on
        record.background = call.scheduling.background

    def set_prompts(self, prompts: Sequence[TokenIds]) -> None:
        """Record whether the prompts invoke the adapter, if that is an activated LoRA."""
        adapter = self._record.adapter
        if isinstance(adapter, AdapterRef) and adapter.invocation_tokens:
            found = [adapter.active_from(prompt) for prompt in prompts]
            self._record.invoked = any(begins is not None for begins in found)

    def __enter__(self) -> None:
        """Record that the request is sent to a replica."""
        self._record.validated_s = self._sent_s = self._now_s()
        self._running(self)

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        """End the request's record, with the error if there is one."""
        self._end(error)

    def on_item(self, item: StreamItem) -> None:
        """Record the facts that an item of the answer's stream contains."""
        record = self._record
        match item:
            case Attempt():
                self._on_attempt(item)
            case Resumed():
                record.resumed += (item.reason,)
            case AnswerHeader():
                if item.is_first:
                    record.accepted_s = self._now_s()
                record.replica, record.load_s = item.replica, item.load_s
                record.residency = item.residency
                if item.status is not None:
                    live = item.status.live
                    record.running, record.waiting = live.decoding, live.pending
            case FinalUsage():
                record.usage = item
            case Refusal():
                record.code, record.param = item.code, item.param

    def on_first_bytes(self) -> None:
        """Record the time of the first bytes."""
        self._record.first_byte_s = self._now_s()

    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Return no headers: a trace adds none."""
        return ()

    def record(self) -> RequestRecord:
        """Return the current record of a running request."""
        return replace(self._record, until_s=self._now_s(), attempts=tuple(self._attempts.values()))

    def _on_attempt(self, attempt: Attempt) -> None:
        earlier = self._attempts.get(attempt.request_id)
        taken_s = None if attempt.replica is None else self._sent_s + attempt.waited_s
        failed_s = None if attempt.failure is None else self._now_s()
        self._attempts[attempt.request_id] = AttemptRecord(
            attempt.request_id,
            attempt.replica,
            earlier.taken_s if earlier else taken_s,
            attempt.failure,
            attempt.candidates,
            failed_s,
        )
        if failed_s is not None:
            self._sent_s = failed_s

    def _end(self, error: BaseException | None) -> None:
        record = self._record
        record.until_s, record.ended = self._now_s(), True
        record.attempts = tuple(self._attempts.values())
        if isinstance(error, LorikeetError):
            record.code, record.param = error.code, error.param
        elif isinstance(error, Exception) and not isinstance(error, ClientDisconnect):
            record.code = LorikeetError.code
        elif self._lost_in_mid_stream():
            record.code = Unavailable.code
        self._ended(record)

    def _lost_in_mid_stream(self) -> bool:
        record = self._record
        answered = record.usage is not None or record.code is not None
        return not answered and bool(record.attempts) and record.attempts[-1].failure is not None

    def _now_s(self) -> float:
        return time.monotonic() - self._received_s
