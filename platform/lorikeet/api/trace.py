"""What a gateway notes of one request as it goes by: numbers and names, never what was said."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
from types import TracebackType
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect

from lorikeet.api.messages import Attempt, Call, Closing, Header, Refusal, StreamItem
from lorikeet.api.replica_response import Headers, RequestObserver
from lorikeet.errors import LorikeetError, Unavailable
from lorikeet_engine.news import EngineLoad
from lorikeet_engine.request import Course

_plain_course = attrgetter(*(field.name for field in fields(Course)))  # astuple takes 5 µs
_SHOWN_MODEL = 200  # characters of a name that may be nobody's


class Try(NamedTuple):
    """An Attempt. weighed: name, tier and routing's Cost of each replica.

    taken_s, failed_s: as Record's times.
    """

    request_id: str
    replica: str | None
    taken_s: float | None
    failure: str | None
    weighed: tuple[tuple[str, int, tuple[float, ...]], ...]
    failed_s: float | None


class Record(NamedTuple):
    """A request as it is kept: plain values alone, which are small and quickly packed.

    came: Unix seconds. Other times are seconds from then on: entered_s, when it was understood and
    sent on; found_s, when a replica had handed it to its engine and said so; first_s, when the
    answer's first bytes were there; until_s, when it was over, or if it is not, now. code, param:
    of the error that ended it. replica, tier, load_s, and running and waiting there: the Header's.
    tokens, courses: the Closing's, of an answer that was made to its end; tokens are prompt, cached
    and output. tries, courses: fields of Try and of Course.
    """

    came: float
    tenant: str
    key_id: str
    model: str
    base_model: str
    adapter: str | None
    digest: str | None
    stream: bool
    entered_s: float | None
    found_s: float | None
    first_s: float | None
    until_s: float
    over: bool
    code: str | None
    param: str | None
    replica: str | None
    tier: int | None
    load_s: float | None
    running: int | None
    waiting: int | None
    tries: tuple[tuple[Any, ...], ...]
    tokens: tuple[int, int, int] | None
    courses: tuple[tuple[Any, ...], ...]


class Trace(RequestObserver):
    """Follows one request from its first line to its end.

    running: called when its call begins. ended: called when it is over; what was refused before
    anybody knew whose it is has no tenant. path, traceparent: of the HTTP request; the latter is
    what a caller says of a trace of its own.
    """

    def __init__(
        self,
        request_id: str,
        running: Callable[["Trace"], None],
        ended: Callable[["Trace"], None],
        path: str = "",
        traceparent: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.path, self.traceparent = path, traceparent
        self.tenant = ""
        self._running, self._ended = running, ended
        self._came, self._came_s = time.time(), time.monotonic()
        self._key_id = self._model = self._base_model = ""
        self._call: Call | None = None
        self._entered_s: float | None = None
        self._found_s: float | None = None
        self._first_s: float | None = None
        self._over_s: float | None = None
        self._sent_s = 0.0  # when the last attempt began
        self._tries: dict[str, Try] = {}
        self._header: Header | None = None
        self._load: EngineLoad | None = None
        self._closing: Closing | None = None
        self._code: str | None = None
        self._param: str | None = None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While it is read and looked at; an error is its end."""
        try:
            yield
        except Exception as error:
            self._end(error)
            raise

    def comes_from(self, tenant: str, key_id: str) -> None:
        """Whose it is."""
        self.tenant, self._key_id = tenant, key_id

    def asks_for(self, model: str) -> None:
        """As the client wrote it."""
        self._model = model[:_SHOWN_MODEL]

    def becomes(self, call: Call, base_model: str) -> None:
        """What was understood."""
        self._call, self._base_model = call, base_model

    def __enter__(self) -> None:
        """Its call begins."""
        self._entered_s = self._sent_s = self._now_s()
        self._running(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """It is over."""
        self._end(error)

    def on_item(self, item: StreamItem) -> None:
        """What is said of it."""
        match item:
            case Attempt():
                self._tried(item)
            case Header():
                if item.load_s is None:
                    self._found_s = self._now_s()
                self._header = item
                self._load = item.news.load if item.news else self._load
            case Closing():
                self._closing = item
            case Refusal():
                self._code, self._param = item.code, item.param

    def on_first_bytes(self) -> Headers:
        """Note when; a trace adds no headers."""
        self._first_s = self._now_s()
        return ()

    def record(self) -> Record:
        """What is known now."""
        call, header, closing, load = self._call, self._header, self._closing, self._load
        adapter = call.adapter if call else None
        tier = header.residency if header else None
        return Record(
            self._came,
            self.tenant,
            self._key_id,
            self._model,
            self._base_model,
            str(adapter) if adapter else None,
            adapter.digest if adapter else None,
            call.stream if call else False,
            self._entered_s,
            self._found_s,
            self._first_s,
            self._now_s() if self._over_s is None else self._over_s,
            self._over_s is not None,
            self._code,
            self._param,
            header.replica if header else None,
            None if tier is None else int(tier),
            header.load_s if header else None,
            load.running if load else None,
            load.waiting if load else None,
            tuple(map(tuple, self._tries.values())),
            (closing.prompt_tokens, closing.cached_tokens, closing.completion_tokens)
            if closing
            else None,
            tuple(map(_plain_course, closing.courses)) if closing else (),
        )

    def _tried(self, attempt: Attempt) -> None:
        earlier = self._tries.get(attempt.request_id)
        taken_s = None if attempt.replica is None else self._sent_s + attempt.waited_s
        failed_s = None if attempt.failure is None else self._now_s()
        self._tries[attempt.request_id] = Try(
            attempt.request_id,
            attempt.replica,
            earlier.taken_s if earlier else taken_s,
            attempt.failure,
            tuple((name, int(tier), tuple(cost)) for name, tier, cost in attempt.weighed),
            failed_s,
        )
        if failed_s is not None:
            self._sent_s = failed_s

    def _end(self, error: BaseException | None) -> None:
        self._over_s = self._now_s()
        if isinstance(error, LorikeetError):
            self._code, self._param = error.code, error.param
        elif isinstance(error, Exception) and not isinstance(error, ClientDisconnect):
            self._code = LorikeetError.code
        elif self._lost_in_mid_stream():
            self._code = Unavailable.code
        self._ended(self)

    def _lost_in_mid_stream(self) -> bool:
        last = next(reversed(self._tries.values()), None)
        answered = self._closing is not None or self._code is not None
        return not answered and last is not None and last.failure is not None

    def _now_s(self) -> float:
        return time.monotonic() - self._came_s
