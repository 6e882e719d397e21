"""The record of one request, numbers and names, never a prompt or an answer; and what fills it.

A RequestTrace is the record's only writer. why.py, ui/ and tracing/ read records.
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
    StreamItem,
)
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.request import EngineTimings

_REFUSALS = {"overloaded", "adapter_not_ready"}
"""Codes of 503s that refuse a request, where nothing has failed."""
_SHOWN_MODEL = 200  # characters of a name that may be any text


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """A replica's try at a request. candidates: what the router considered, the best first.

    taken_s, failed_s: as RequestRecord's times; None where it did not. failure: None where it did
    not fail.
    """

    request_id: str
    replica: str | None
    taken_s: float | None
    failure: str | None
    candidates: tuple[Candidate[str], ...]
    failed_s: float | None


@dataclass(frozen=True, slots=True)
class EndedStage:
    """A stage of a request that asks no replica to generate. at_s: as RequestRecord's times."""

    name: str
    at_s: float


@dataclass(slots=True)
class RequestRecord:
    """A request, as far as it is known.

    received: Unix seconds. Other times are seconds from then on: validated_s, when it was checked
    and sent on; accepted_s, when a replica had handed it to its engine and said so; first_byte_s,
    when the answer's first bytes came; until_s, when the request ended, or now if it runs.
    method, path, traceparent: the HTTP request's; the last names a trace of the caller's own.
    tenant: None until its key is checked. model: as the client wrote it. base_quantization: what
    the base model's linears were rounded to. trained_on: what the adapter calls it. code, param:
    the error's that ended it. replica, residency, load_s, running and waiting (on the replica): the
    AnswerHeader's. usage: None unless the answer is complete. ended_stages: a push's, in order.
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
    adapter: AdapterRef | None = None
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
    usage: FinalUsage | None = None
    method: str = "POST"
    ended_stages: tuple[EndedStage, ...] = ()

    @property
    def outcome(self) -> str:
        """running, finished, refused, failed, or cancelled: its client left."""
        if not self.ended:
            return "running"
        if self.code is not None:
            refused = status_of(self.code) < 500 or self.code in _REFUSALS
            return "refused" if refused else "failed"
        return "cancelled" if self.usage is None else "finished"

    @property
    def timings(self) -> tuple[EngineTimings, ...]:
        """The timings of each choice, of a complete answer."""
        return self.usage.timings if self.usage else ()

    @property
    def slowest(self) -> EngineTimings | None:
        """The timings of the choice that took longest."""
        return max(self.timings, key=engine_s, default=None)

    @property
    def first_token_s(self) -> float | None:
        """The time to the first token: of a stream measured, else estimated from the timings."""
        slowest = self.slowest
        if self.stream or slowest is None:
            return self.first_byte_s if self.stream else None
        return max(0.0, self.until_s - slowest.decode_s)

    @property
    def retries(self) -> int:
        """How many attempts failed."""
        return sum(attempt.failure is not None for attempt in self.attempts)


def engine_s(timings: EngineTimings) -> float:
    """Return the seconds in the engine."""
    return timings.queued_s + timings.prefill_s + timings.decode_s


class RequestTrace:
    """Follows one request from its first line to its end; the call's RequestObserver.

    running: called when the call begins. ended: called with the record when the request ends.
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
        self._came_s = time.monotonic()
        self._sent_s = 0.0  # when the last attempt began
        self._attempts: dict[str, AttemptRecord] = {}

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._record.request_id

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Hold while the request is read and checked; an error is its end."""
        try:
            yield
        except Exception as error:
            self._end(error)
            raise

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Hold while a request is answered that asks no replica."""
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise
        self._record.usage = FinalUsage(0, 0, 0)
        self._end(None)

    def set_caller(self, tenant: str, key_id: str) -> None:
        """Note whose request this is."""
        self._record.tenant, self._record.key_id = tenant, key_id

    def set_model(self, model: str) -> None:
        """Note the model as the client wrote it."""
        self._record.model = model[:_SHOWN_MODEL]

    def end_stage(self, name: str, at_s: float | None = None) -> None:
        """Note that a stage has ended, at time.monotonic() or when that was `at_s`."""
        ended = EndedStage(name, (at_s or time.monotonic()) - self._came_s)
        self._record.ended_stages += (ended,)

    def set_call(
        self, call: Call, base_model: str, quantization: str | None, trained_on: str | None
    ) -> None:
        """Note what the request asks for, and how that is served."""
        record = self._record
        record.adapter, record.stream, record.base_model = call.adapter, call.stream, base_model
        record.base_quantization, record.trained_on = quantization, trained_on

    def __enter__(self) -> None:
        """Note that the request is sent on."""
        self._record.validated_s = self._sent_s = self._now_s()
        self._running(self)

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        """End the request."""
        self._end(error)

    def on_item(self, item: StreamItem) -> None:
        """Note what an item says of the request."""
        record = self._record
        match item:
            case Attempt():
                self._on_attempt(item)
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

    def on_first_bytes(self) -> Sequence[tuple[bytes, bytes]]:
        """Note when; a trace adds no headers."""
        self._record.first_byte_s = self._now_s()
        return ()

    def record(self) -> RequestRecord:
        """Return the record of a request that runs, as it is now."""
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
        return time.monotonic() - self._came_s
