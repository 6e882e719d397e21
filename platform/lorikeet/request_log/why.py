"""Explanation of a request's duration as JSON, for `lorikeet why`."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from lorikeet.base_warning import base_warning
from lorikeet.protocol.messages import FinalUsage
from lorikeet.request_log.record import AttemptRecord, EndedStage, RequestRecord, engine_s
from lorikeet_engine.adapter import Composition, Residency

Json = dict[str, Any]


def explain(record: RequestRecord, *, for_admin: bool) -> Json:
    """Return a record as JSON; times in milliseconds.

    The stages are consecutive and cover the time from arrival to end. If the replica has sent its
    timings, `overhead` is the time outside gateway and engine: tokenizing, detokenizing, messages
    between processes, and the client's reading. If the answer has several choices, the stages are
    the slowest choice's.

    for_admin: include facts about other requests: the router's expected costs, and the numbers of
        sequences that decode and that wait on the replica.
    """
    explanation = {
        "id": record.request_id,
        "request": f"{record.method} {record.path}",
        "received": record.received,
        "tenant": record.tenant,
        "key_id": record.key_id,
        "model": record.model or "",
        **_base_model(record),
        "adapter": str(record.adapter) if record.adapter else None,
        "digest": record.adapter.digest if record.adapter else None,
        "invoked": record.invoked,
        "adapters": _adapters(record),
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
        "drafts": None,
        "retries": record.retries,
        "resumed": list(record.resumed),
    }
    if (usage := record.usage) is not None:
        from_host = sum(timings.host_tokens for timings in record.timings)
        explanation["tokens"] = _tokens(usage) | {"from_host": from_host}
        explanation["preemptions"] = sum(timings.preemptions for timings in record.timings)
        drafts = record.drafts
        explanation["drafts"] = {
            "drafted": sum(counts.drafted for counts in drafts),
            "accepted": sum(counts.accepted for counts in drafts),
            "sources": {
                counts.source: {"drafted": counts.drafted, "accepted": counts.accepted}
                for counts in drafts
            },
        }
    if for_admin:
        explanation["replica_status"] = {"running": record.running, "waiting": record.waiting}
        explanation["attempts"] = [_attempt(record, attempt) for attempt in record.attempts]
    return explanation


def _base_model(record: RequestRecord) -> Json:
    name, quantization = record.base_model, record.base_quantization
    return {
        "base_model": name,
        "base_quantization": quantization,
        "base_warning": base_warning(record.trained_on, name or "", quantization),
    }


def _adapters(record: RequestRecord) -> list[Json] | None:
    """Return each adapter of a composition, with its tier when the request came and the time that
    the slowest choice waited for it; None without a composition.
    """
    composition = record.adapter
    if not isinstance(composition, Composition):
        return None
    slowest = record.slowest
    loads = slowest.members if slowest is not None else ()
    known = zip_longest(composition.members, composition.weights, loads)
    return [
        {
            "adapter": str(ref),
            "digest": ref.digest,
            "weight": weight,
            "residency": _tier(load.residency) if load else None,
            "load_ms": _ms(load.load_s) if load else None,
        }
        for ref, weight, load in known
    ]


def _tokens(usage: FinalUsage) -> Json:
    return {
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "output": usage.completion_tokens,
    }


def _stages(record: RequestRecord) -> list[tuple[str, float]]:
    end_s, slowest = record.until_s, record.slowest
    if record.ended_stages:
        return _between(record.ended_stages, end_s)
    if record.validated_s is None:
        return [("validate", end_s)]
    stages = [("validate", record.validated_s)]
    taken_s = record.attempts[-1].taken_s if record.attempts else record.validated_s
    if taken_s is None:
        return [*stages, ("route", end_s - record.validated_s)]
    if slowest is not None:
        # The engine begins before the replica's message reaches the gateway.
        taken_s = min(taken_s, end_s - engine_s(slowest))
        return [
            *stages,
            ("route", taken_s - record.validated_s),
            ("overhead", end_s - taken_s - engine_s(slowest)),
            ("queue", slowest.queued_s - slowest.load_s),
            ("adapter", slowest.load_s),
            ("prefill", slowest.prefill_s),
            ("decode", slowest.decode_s),
        ]
    stages.append(("route", taken_s - record.validated_s))
    if record.first_byte_s is None:
        return [*stages, ("first bytes", end_s - taken_s)]
    return [
        *stages,
        ("first bytes", record.first_byte_s - taken_s),
        ("rest", end_s - record.first_byte_s),
    ]


def _between(ended: Sequence[EndedStage], end_s: float) -> list[tuple[str, float]]:
    """Return for each stage its name and the seconds from the end of the stage before it to its own
    end.

    The time after the last stage, until `end_s`, is the stage "rest".
    """
    stages, since_s = list[tuple[str, float]](), 0.0
    for stage in (*ended, EndedStage("rest", end_s)):
        at_s = max(since_s, stage.at_s)
        stages.append((stage.name, at_s - since_s))
        since_s = at_s
    return stages


def _attempt(record: RequestRecord, attempt: AttemptRecord) -> Json:
    sent_s = record.validated_s or 0.0
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
