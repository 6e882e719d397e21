"""What a record says, as JSON."""

from typing import Any

from lorikeet.api.trace import Record, Try
from lorikeet.errors import status_of
from lorikeet.routing.choice import Cost
from lorikeet_engine.adapter import Residency
from lorikeet_engine.request import Course

Json = dict[str, Any]

_COMPUTED = {"overloaded", "adapter_not_ready"}
"""503s that say no, and not that something failed."""


def explain(request_id: str, record: Record, *, for_admin: bool) -> Json:
    """The whole story of a request; times in milliseconds.

    The stages follow on each other and fill the time from its arrival to its end. Where the replica
    has told what it took, `way` is all that is neither the gateway's nor the engine's: prompts to
    tokens, tokens to text, processes and the client's reading. Of several choices the slowest one's
    stages are told. Only admins are told of other requests: what the router expected, and how many
    ran and waited at the replica.
    """
    slowest = slowest_course(record)
    told = {
        "id": request_id,
        "came": record.came,
        "tenant": record.tenant,
        "key_id": record.key_id,
        "model": record.model,
        "base_model": record.base_model or None,
        "adapter": record.adapter,
        "digest": record.digest,
        "stream": record.stream,
        "outcome": outcome_of(record),
        "code": record.code,
        "param": record.param,
        "total_ms": _ms(record.until_s),
        "first_token_ms": _ms(first_token_s(record, slowest)),
        "stages": [{"stage": name, "ms": _ms(took_s)} for name, took_s in _stages(record, slowest)],
        "replica": record.replica,
        "residency": None if record.tier is None else str(Residency(record.tier)),
        "load_ms": _ms(record.load_s),
        "tokens": None,
        "preemptions": None,
        "retries": sum(Try(*each).failure is not None for each in record.tries),
    }
    if record.tokens is not None:
        told["tokens"] = dict(zip(("prompt", "cached", "output"), record.tokens, strict=True))
        told["preemptions"] = sum(Course(*each).preemptions for each in record.courses)
    if for_admin:
        told["there_then"] = {"running": record.running, "waiting": record.waiting}
        told["attempts"] = [_attempt(record, Try(*each)) for each in record.tries]
    return told


def outcome_of(record: Record) -> str:
    """running, finished, refused, failed, or client left."""
    if not record.over:
        return "running"
    if record.code is not None:
        refused = status_of(record.code) < 500 or record.code in _COMPUTED
        return "refused" if refused else "failed"
    return "finished" if record.tokens is not None else "client left"


def slowest_course(record: Record) -> Course | None:
    """Of the choices of an answer that was made to its end, what the longest went through."""
    courses = [Course(*each) for each in record.courses]
    return max(courses, key=engine_s, default=None)


def engine_s(course: Course) -> float:
    """In the engine, seconds."""
    return course.queued_s + course.prefill_s + course.decode_s


def _stages(record: Record, slowest: Course | None) -> list[tuple[str, float]]:
    end_s = record.until_s
    if record.entered_s is None:
        return [("gateway", end_s)]
    stages = [("gateway", record.entered_s)]
    taken_s = Try(*record.tries[-1]).taken_s if record.tries else record.entered_s
    if taken_s is None:
        return [*stages, ("replica", end_s - record.entered_s)]
    stages.append(("replica", taken_s - record.entered_s))
    if slowest is not None:
        return [
            *stages,
            ("way", max(0.0, end_s - taken_s - engine_s(slowest))),
            ("queue", max(0.0, slowest.queued_s - slowest.load_s)),
            ("adapter", slowest.load_s),
            ("prefill", slowest.prefill_s),
            ("generation", slowest.decode_s),
        ]
    if record.first_s is None:
        return [*stages, ("first bytes", end_s - taken_s)]
    return [*stages, ("first bytes", record.first_s - taken_s), ("rest", end_s - record.first_s)]


def first_token_s(record: Record, slowest: Course | None) -> float | None:
    """Measured where the answer is a stream; else what was left to generate is taken off."""
    if record.stream or slowest is None:
        return record.first_s if record.stream else None
    return max(0.0, record.until_s - slowest.decode_s)


def _attempt(record: Record, tried: Try) -> Json:
    sent_s = record.entered_s or 0.0
    return {
        "id": tried.request_id,
        "replica": tried.replica,
        "taken_ms": None if tried.taken_s is None else _ms(tried.taken_s - sent_s),
        "failure": tried.failure,
        "candidates": [
            _candidate(name, tier if record.digest else None, Cost(*cost))
            for name, tier, cost in tried.weighed
        ],
    }


def _candidate(replica: str, tier: int | None, cost: Cost) -> Json:
    return {
        "replica": replica,
        "residency": None if tier is None else str(Residency(tier)),
        "cost_ms": _ms(cost.total_s),
        "prefill_ms": _ms(cost.prefill_s),
        "queue_ms": _ms(cost.queue_s),
        "load_ms": _ms(cost.load_s),
        "others_ms": _ms(cost.others_s),
        "copy_ms": _ms(cost.copy_s),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
