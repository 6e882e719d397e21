"""What a record says, as JSON."""

from typing import Any

from lorikeet.request_log.record import AttemptRecord, RequestRecord, engine_s
from lorikeet_engine.adapter import Residency

Json = dict[str, Any]


def explain(record: RequestRecord, *, for_admin: bool) -> Json:
    """The whole story of a request; times in milliseconds.

    The stages follow on each other and fill the time from its arrival to its end. Where the replica
    has told what it took, `way` is all that is neither the gateway's nor the engine's: prompts to
    tokens, tokens to text, processes and the client's reading. Of several choices the slowest one's
    stages are told. Only admins are told of other requests: what the router expected, and how many
    ran and waited at the replica.
    """
    told = {
        "id": record.request_id,
        "came": record.came,
        "tenant": record.tenant,
        "key_id": record.key_id,
        "model": record.model or "",
        "base_model": record.base_model,
        "adapter": str(record.adapter) if record.adapter else None,
        "digest": record.adapter.digest if record.adapter else None,
        "stream": record.stream,
        "outcome": record.outcome,
        "code": record.code,
        "param": record.param,
        "total_ms": _ms(record.until_s),
        "first_token_ms": _ms(record.first_token_s),
        "stages": [{"stage": name, "ms": _ms(took_s)} for name, took_s in _stages(record)],
        "replica": record.replica,
        "residency": _tier(record.residency),
        "load_ms": _ms(record.load_s),
        "tokens": None,
        "preemptions": None,
        "retries": record.retries,
    }
    if record.tokens is not None:
        told["tokens"] = dict(zip(("prompt", "cached", "output"), record.tokens, strict=True))
        told["preemptions"] = sum(course.preemptions for course in record.courses)
    if for_admin:
        told["there_then"] = {"running": record.running, "waiting": record.waiting}
        told["attempts"] = [_attempt(record, attempt) for attempt in record.attempts]
    return told


def _stages(record: RequestRecord) -> list[tuple[str, float]]:
    end_s, slowest = record.until_s, record.slowest
    if record.entered_s is None:
        return [("gateway", end_s)]
    stages = [("gateway", record.entered_s)]
    taken_s = record.attempts[-1].taken_s if record.attempts else record.entered_s
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


def _attempt(record: RequestRecord, attempt: AttemptRecord) -> Json:
    sent_s = record.entered_s or 0.0
    return {
        "id": attempt.request_id,
        "replica": attempt.replica,
        "taken_ms": None if attempt.taken_s is None else _ms(attempt.taken_s - sent_s),
        "failure": attempt.failure,
        "candidates": [
            {
                "replica": name,
                "residency": _tier(tier if record.adapter else None),
                "cost_ms": _ms(cost.total_s),
                "prefill_ms": _ms(cost.prefill_s),
                "queue_ms": _ms(cost.queue_s),
                "load_ms": _ms(cost.load_s),
                "others_ms": _ms(cost.others_s),
                "copy_ms": _ms(cost.copy_s),
            }
            for name, tier, cost in attempt.candidates
        ],
    }


def _tier(residency: Residency | None) -> str | None:
    return None if residency is None else str(residency)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
