"""What is known of one request: numbers and names, never what was said."""

from dataclasses import dataclass

from lorikeet.errors import status_of
from lorikeet.protocol.messages import FinalUsage
from lorikeet.routing.ranking import Candidate
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.request import EngineTimings

_COMPUTED = {"overloaded", "adapter_not_ready"}
"""503s that say no, and not that something failed."""


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


@dataclass(slots=True)
class RequestRecord:
    """A request, as far as it is known.

    came: Unix seconds. Other times are seconds from then on: entered_s, when it was understood and
    sent on; found_s, when a replica had handed it to its engine and said so; first_s, when the
    answer's first bytes were there; until_s, when it was over, or if it is not, now.
    path, traceparent: of the HTTP request; the latter is what a caller says of a trace of its own.
    tenant: None while nobody knows whose it is. model: as the client wrote it. code, param: of the
    error that ended it. replica, residency, load_s, and running and waiting there: its Header's.
    usage: of an answer that was made to its end.
    """

    request_id: str
    path: str
    traceparent: str | None
    came: float
    tenant: str | None = None
    key_id: str | None = None
    model: str | None = None
    base_model: str | None = None
    adapter: AdapterRef | None = None
    stream: bool = False
    entered_s: float | None = None
    found_s: float | None = None
    first_s: float | None = None
    until_s: float = 0.0
    over: bool = False
    code: str | None = None
    param: str | None = None
    replica: str | None = None
    residency: Residency | None = None
    load_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    usage: FinalUsage | None = None

    @property
    def outcome(self) -> str:
        """running, finished, refused, failed, or cancelled: its client left."""
        if not self.over:
            return "running"
        if self.code is not None:
            refused = status_of(self.code) < 500 or self.code in _COMPUTED
            return "refused" if refused else "failed"
        return "cancelled" if self.usage is None else "finished"

    @property
    def tokens(self) -> tuple[int, int, int] | None:
        """Prompt, cached and output, of an answer that was made to its end."""
        if self.usage is None:
            return None
        return (
            self.usage.prompt_tokens,
            self.usage.cached_tokens,
            self.usage.completion_tokens,
        )

    @property
    def courses(self) -> tuple[EngineTimings, ...]:
        """What each choice went through, of an answer that was made to its end."""
        return self.usage.courses if self.usage else ()

    @property
    def slowest(self) -> EngineTimings | None:
        """What the longest choice went through."""
        return max(self.courses, key=engine_s, default=None)

    @property
    def first_token_s(self) -> float | None:
        """Measured where the answer is a stream; else what was left to generate is taken off."""
        slowest = self.slowest
        if self.stream or slowest is None:
            return self.first_s if self.stream else None
        return max(0.0, self.until_s - slowest.decode_s)

    @property
    def retries(self) -> int:
        """How many replicas failed it."""
        return sum(attempt.failure is not None for attempt in self.attempts)


def engine_s(course: EngineTimings) -> float:
    """In the engine, seconds."""
    return course.queued_s + course.prefill_s + course.decode_s
