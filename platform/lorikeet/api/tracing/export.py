"""The way of spans to the collector: gathered, and sent by a thread of their own."""

import asyncio
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from lorikeet.api.trace import Record, Trace
from lorikeet.api.tracing.sampling import origin_of
from lorikeet.api.tracing.spans import gateway_resource, spans_of

_SEND_S = 5
_LAST_S = 2  # for what is left at the end
_QUEUE = 8192  # spans: a second of a busy gateway's
_BATCH = 512
_GATHER_MS = 200


class Traces:
    """Hears of requests that are over and sends a share of them as traces.

    endpoint: the collector's OTLP/HTTP address, to which /v1/traces is added; headers and
    certificates for it come from OTEL_EXPORTER_OTLP_ variables. While the collector is away, the
    newest spans are kept and the oldest dropped; no request waits for either.
    """

    def __init__(self, endpoint: str, share: float, gateway: str) -> None:
        self._share = share
        self._gateway = gateway_resource(gateway)
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_SEND_S)
        self._queue = BatchSpanProcessor(exporter, _QUEUE, _GATHER_MS, _BATCH)

    def ended(self, trace: Trace, record: Record) -> None:
        """A request is over."""
        if not record.tenant:  # anybody can send those
            return
        origin = origin_of(trace.request_id, trace.traceparent, self._share)
        if origin is not None:
            for span in spans_of(origin, trace, record, self._gateway):
                self._queue.on_end(span)

    async def close(self) -> None:
        """Send what is left, if the collector takes it at once."""
        # a daemon thread: the queue itself waits half a minute for a collector that is away
        last = threading.Thread(target=self._queue.shutdown, daemon=True)
        last.start()
        await asyncio.to_thread(last.join, _LAST_S)
