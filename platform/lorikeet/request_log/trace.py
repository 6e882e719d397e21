"""Follows one request as it goes by, and notes what becomes of it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

from starlette.requests import ClientDisconnect

from lorikeet.errors import LorikeetError, Unavailable
from lorikeet.protocol.messages import AnswerHeader, Attempt, Call, FinalUsage, Refusal, StreamItem
from lorikeet.request_log.record import AttemptRecord, RequestRecord

_SHOWN_MODEL = 200  # characters of a name that may be nobody's


class RequestTrace:
    """Follows one request from its first line to its end; the call's RequestObserver.

    running: called when its call begins. ended: called when it is over, with all that is known.
    """

    def __init__(
        self,
        request_id: str,
        running: Callable[["RequestTrace"], None],
        ended: Callable[[RequestRecord], None],
        path: str = "",
        traceparent: str | None = None,
    ) -> None:
        self._known = RequestRecord(request_id, path, traceparent, time.time())
        self._running, self._ended = running, ended
        self._came_s = time.monotonic()
        self._sent_s = 0.0  # when the last attempt began
        self._attempts: dict[str, AttemptRecord] = {}

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._known.request_id

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While it is read and looked at; an error is its end."""
        try:
            yield
        except Exception as error:
            self._end(error)
            raise

    def comes_from(self, tenant: str, key_id: str) -> None:
        """Note whose request this is."""
        self._known.tenant, self._known.key_id = tenant, key_id

    def asks_for(self, model: str) -> None:
        """Note the model as the client wrote it."""
        self._known.model = model[:_SHOWN_MODEL]

    def becomes(self, call: Call, base_model: str) -> None:
        """Note what was understood."""
        known = self._known
        known.adapter, known.stream, known.base_model = call.adapter, call.stream, base_model

    def __enter__(self) -> None:
        """Begin: the request is sent on."""
        self._known.entered_s = self._sent_s = self._now_s()
        self._running(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End: the request is over."""
        self._end(error)

    def on_item(self, item: StreamItem) -> None:
        """Note what is said of the request."""
        known = self._known
        match item:
            case Attempt():
                self._tried(item)
            case AnswerHeader():
                if item.load_s is None:
                    known.found_s = self._now_s()
                known.replica, known.load_s = item.replica, item.load_s
                known.residency = item.residency
                if item.status is not None:
                    live = item.status.live
                    known.running, known.waiting = live.decoding, live.pending
            case FinalUsage():
                known.usage = item
            case Refusal():
                known.code, known.param = item.code, item.param

    def on_first_bytes(self) -> Sequence[tuple[bytes, bytes]]:
        """Note when; a trace adds no headers."""
        self._known.first_s = self._now_s()
        return ()

    def record(self) -> RequestRecord:
        """What is known now of one that is not over."""
        return replace(self._known, until_s=self._now_s(), attempts=tuple(self._attempts.values()))

    def _tried(self, attempt: Attempt) -> None:
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
        known = self._known
        known.until_s, known.over = self._now_s(), True
        known.attempts = tuple(self._attempts.values())
        if isinstance(error, LorikeetError):
            known.code, known.param = error.code, error.param
        elif isinstance(error, Exception) and not isinstance(error, ClientDisconnect):
            known.code = LorikeetError.code
        elif self._lost_in_mid_stream():
            known.code = Unavailable.code
        self._ended(known)

    def _lost_in_mid_stream(self) -> bool:
        known = self._known
        answered = known.usage is not None or known.code is not None
        return not answered and bool(known.attempts) and known.attempts[-1].failure is not None

    def _now_s(self) -> float:
        return time.monotonic() - self._came_s
