"""The record of one request: numbers and names, never a prompt or an answer."""

from dataclasses import dataclass

from lorikeet.errors import status_of
from lorikeet.protocol.messages import FinalUsage
from lorikeet.routing.ranking import Candidate
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.request import EngineTimings

_REFUSALS = {"overloaded", "adapter_not_ready"}
"""Codes of 503s that refuse a request, where nothing has failed."""


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

    received: Unix seconds. Other times are seconds from then on: validated_s, when it was checked
    and sent on; accepted_s, when a replica had handed it to its engine and said so; first_byte_s,
    when the answer's first bytes came; until_s, when the request ended, or now if it runs.
    path, traceparent: the HTTP request's; the latter names a trace of the caller's own. tenant:
    None until its key is checked. model: as the client wrote it. code, param: the error's that
    ended it. replica, residency, load_s, running and waiting (on the replica): the AnswerHeader's.
    usage: None unless the answer is complete.
    """

    request_id: str
    path: str
    traceparent: str | None
    received: float
    tenant: str | None = None
    key_id: str | None = None
    model: str | None = None
    base_model: str | None = None
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
