"""Spans of one ended request.

    POST /v1/chat/completions     gateway's span, from arrival to end
    ├── validate                  key, limits, body, model
    └── attempt                   one for each attempted replica
        ├── route                 until a replica took the call
        └── chat                  replica's span, from then on
            ├── adapter           until the adapter was on the GPU
            ├── queue             until the first step
            ├── prefill           until the first token
            └── decode            until the last token

The durations of the last four are the engine's measurements for the slowest choice. They leave gaps
for tokenizing, detokenizing and messages between processes. Names follow OpenTelemetry's HTTP and
GenAI conventions where these define names. Records hold no prompt, answer or key, so spans hold
none either.
"""

from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lorikeet.apis.errors import api_of_path, error_status
from lorikeet.request_log.record import RequestRecord, engine_s
from lorikeet_engine.request import EngineTimings

Attributes = dict[str, str | int | float | bool | None]

_SCOPE = InstrumentationScope("lorikeet")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/responses/input_tokens": "count_tokens",
    "/v1/classify": "classify",
    "/v1/score": "score",
    "/v1/pooling": "pooling",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/classify": "classify",
    "/score": "score",
    "/pooling": "pooling",
    "/rerank": "rerank",
    "/v1/embeddings": "embeddings",
}
_IDS = RandomIdGenerator()
_RANDOM_BITS = 56
_PROPAGATOR = TraceContextTextMapPropagator()


class Origin(NamedTuple):
    """Trace that a request's spans belong to.

    parent: span of the client that sent the request; None if the client sent none.
    """

    trace_id: int
    parent: SpanContext | None


def origin_of(request_id: str, traceparent: str | None, share: float) -> Origin | None:
    """Return the trace of a request; None if the request is not sampled.

    If the caller sent a traceparent (W3C Trace Context), the caller's decision holds. Without one,
    the trace's id is the request's, and its last 56 bits decide, as OpenTelemetry's consistent
    probability sampling requires.

    share: fraction of requests to sample, 0 to 1.
    """
    if traceparent is not None:
        context = _PROPAGATOR.extract({"traceparent": traceparent})
        parent = get_current_span(context).get_span_context()
        if parent.is_valid:
            return Origin(parent.trace_id, parent) if parent.trace_flags.sampled else None
    trace_id = int(request_id, 16)
    random_bits = trace_id & (2**_RANDOM_BITS - 1)
    return Origin(trace_id, None) if random_bits >= (1 - share) * 2**_RANDOM_BITS else None


def gateway_resource(name: str) -> Resource:
    """Return the resource of a gateway's spans, with the attributes in OTEL_RESOURCE_ATTRIBUTES."""
    return Resource.create(_service("lorikeet-gateway", name))


@lru_cache(maxsize=1024)
def replica_resource(name: str, base_model: str) -> Resource:
    """Return the resource of a replica's spans, which the gateway creates."""
    return Resource(_service("lorikeet-engine", name) | {"lorikeet.base_model": base_model})


def spans_of(origin: Origin, record: RequestRecord, gateway: Resource) -> list[ReadableSpan]:
    """Return all spans of an ended request; parents come before their children.

    origin: the trace that the spans belong to.
    gateway: resource of the gateway's spans.
    """
    spans = _Spans(origin.trace_id, round(record.received * 1e9))
    operation = _OPERATIONS.get(record.path, "")
    failure = record.code if record.outcome == "failed" else None
    root = spans.add(
        f"{record.method} {record.path}",
        origin.parent,
        (0.0, record.until_s),
        gateway,
        kind=SpanKind.SERVER,
        attributes=_request(record, operation) | _answer(record),
        failure=failure,
    )
    sent_s = record.until_s if record.validated_s is None else record.validated_s
    spans.add("validate", root, (0.0, sent_s), gateway)
    for tried in record.attempts:
        end_s = record.until_s if tried.failed_s is None else tried.failed_s
        taken_s = end_s if tried.taken_s is None else min(tried.taken_s, end_s)
        attempt = spans.add(
            "attempt",
            root,
            (sent_s, end_s),
            gateway,
            kind=SpanKind.CLIENT,
            attributes={"lorikeet.request_id": tried.request_id, "lorikeet.replica": tried.replica},
            failure=tried.failure,
        )
        spans.add("route", attempt, (sent_s, taken_s), gateway)
        if tried.replica is not None:
            there = replica_resource(tried.replica, record.base_model or "")
            _add_replica(spans, attempt, record, operation, (taken_s, end_s), there)
        sent_s = end_s
    return spans.made


class _Spans:
    """Spans of one trace. Times are seconds since `received_ns`, the request's arrival."""

    def __init__(self, trace_id: int, received_ns: int) -> None:
        self._trace_id, self._received_ns = trace_id, received_ns
        self.made: list[ReadableSpan] = []

    def add(
        self,
        name: str,
        parent: SpanContext | None,
        during: tuple[float, float],
        resource: Resource,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        failure: str | None = None,
    ) -> SpanContext:
        """Add a span; return its context, to be the parent of further spans.

        during: begin and end, in seconds since `received_ns`.
        resource: process that the span belongs to.
        failure: error description; None: the span did not fail.
        """
        context = SpanContext(self._trace_id, _IDS.generate_span_id(), False, _SAMPLED)
        begin_s, end_s = during
        # Not by a tracer, which measures running code: this request has ended.
        span = ReadableSpan(
            name,
            context,
            parent,
            resource,
            {key: value for key, value in (attributes or {}).items() if value is not None},
            kind=kind,
            status=Status() if failure is None else Status(StatusCode.ERROR, failure),
            start_time=self._received_ns + round(begin_s * 1e9),
            end_time=self._received_ns + round(end_s * 1e9),
            instrumentation_scope=_SCOPE,
        )
        self.made.append(span)
        return context


def _add_replica(
    spans: _Spans,
    attempt: SpanContext,
    record: RequestRecord,
    operation: str,
    during: tuple[float, float],
    there: Resource,
) -> None:
    taken_s, end_s = during
    timings = record.slowest if end_s == record.until_s else None  # None if the attempt failed
    replica = spans.add(
        operation,
        attempt,
        during,
        there,
        kind=SpanKind.SERVER,
        attributes=_answer(record) if timings else None,
    )
    if timings is None:
        return
    at_s = _engine_start_s(record, timings, taken_s, end_s)
    for stage, took_s in (
        ("adapter", timings.load_s),
        ("queue", timings.queued_s - timings.load_s),
        ("prefill", timings.prefill_s),
        ("decode", timings.decode_s),
    ):
        then_s = min(at_s + took_s, end_s)
        spans.add(stage, replica, (at_s, then_s), there)
        at_s = then_s


def _engine_start_s(
    record: RequestRecord, timings: EngineTimings, taken_s: float, end_s: float
) -> float:
    """Return the latest possible start of the engine's work, in seconds since the request arrived.

    timings: the engine's timings of the slowest choice.
    taken_s: time when the replica took the call.
    end_s: end of the answer.
    """
    latest = [end_s - engine_s(timings)]
    if record.accepted_s is not None:
        latest.append(record.accepted_s)
    if record.stream and record.first_byte_s is not None and len(record.timings) == 1:
        latest.append(record.first_byte_s - timings.queued_s - timings.prefill_s)
    return max(taken_s, min(latest))


def _request(record: RequestRecord, operation: str) -> Attributes:
    status = record.code and error_status(record.code, api_of_path(record.path))
    if record.first_byte_s is not None or record.usage is not None:
        status = HTTPStatus.OK
    return {
        "http.request.method": record.method,
        "http.route": record.path,
        "http.response.status_code": status,
        "error.type": record.code,
        "gen_ai.operation.name": operation or None,
        "gen_ai.provider.name": "lorikeet",
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.stream,
        "gen_ai.response.model": str(record.adapter) if record.adapter else record.base_model,
        "gen_ai.response.time_to_first_chunk": record.first_byte_s if record.stream else None,
        "lorikeet.request_id": record.request_id,
        "lorikeet.tenant": record.tenant,
        "lorikeet.outcome": record.outcome,
    }


def _answer(record: RequestRecord) -> Attributes:
    adapter = record.adapter
    usage = record.usage
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens if usage else None,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens if usage else None,
        "gen_ai.usage.output_tokens": usage.completion_tokens if usage else None,
        "lorikeet.base_model": record.base_model,
        "lorikeet.adapter": str(adapter) if adapter else None,
        "lorikeet.digest": adapter.digest if adapter else None,
        "lorikeet.residency": None if record.residency is None else str(record.residency),
        "lorikeet.replica": record.replica,
        "lorikeet.choices": len(record.timings) or None,
    }


def _service(name: str, instance: str) -> dict[str, str]:
    return {
        "service.namespace": "lorikeet",
        "service.name": name,
        "service.instance.id": instance,
    }
