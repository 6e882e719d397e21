"""The trace of one request through its gateway, which fills the request's record."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

from starlette.requests import ClientDisconnect

from lorikeet.errors import LorikeetError, Unavailable
from lorikeet.protocol.messages import AnswerHeader, Attempt, Call, FinalUsage, Refusal, StreamItem
from lorikeet.request_log.record import AttemptRecord, RequestRecord

_SHOWN_MODEL = 200  # characters of a name that may be any text


class RequestTrace:
    """Follows one request from its first line to its end; the call's RequestObserver.

    running: called when the call begins. ended: called with the record when the request ends.
    """

    def __init__(
        self,
        request_id: str,
        running: Callable[["RequestTrace"], None],
        ended: Callable[[RequestRecord], None],
        path: str = "",
        traceparent: str | None = None,
    ) -> None:
        self._record = RequestRecord(request_id, path, traceparent, time.time())
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

    def set_caller(self, tenant: str, key_id: str) -> None:
        """Note whose request this is."""
        self._record.tenant, self._record.key_id = tenant, key_id

    def set_model(self, model: str) -> None:
        """Note the model as the client wrote it."""
        self._record.model = model[:_SHOWN_MODEL]

    def set_call(self, call: Call, base_model: str) -> None:
        """Note what the request asks for."""
        record = self._record
        record.adapter, record.stream, record.base_model = call.adapter, call.stream, base_model

    def __enter__(self) -> None:
        """Note that the request is sent on."""
        self._record.validated_s = self._sent_s = self._now_s()
        self._running(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
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
