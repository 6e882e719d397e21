"""Which requests are traced, and under whose span."""

from typing import NamedTuple

from opentelemetry.trace import SpanContext, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_RANDOM_BITS = 56
_PROPAGATOR = TraceContextTextMapPropagator()


class Origin(NamedTuple):
    """Where a request's spans belong. parent: the caller's span, if it sent one."""

    trace_id: int
    parent: SpanContext | None


def origin_of(request_id: str, traceparent: str | None, share: float) -> Origin | None:
    """None where it is not traced.

    What a caller decided in its traceparent (W3C Trace Context) stands. Without one, the request's
    id is the trace's, and its last 56 bits decide: all random in a UUID of version 4, as
    OpenTelemetry's consistent probability sampling wants them.
    """
    if traceparent is not None:
        context = _PROPAGATOR.extract({"traceparent": traceparent})
        parent = get_current_span(context).get_span_context()
        if parent.is_valid:
            return Origin(parent.trace_id, parent) if parent.trace_flags.sampled else None
    trace_id = int(request_id, 16)
    drawn = trace_id & (2**_RANDOM_BITS - 1)
    return Origin(trace_id, None) if drawn >= (1 - share) * 2**_RANDOM_BITS else None
