"""Exporter that sends spans in batches from a background thread."""

import asyncio
import logging
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from lorikeet.request_log.record import RequestRecord
from lorikeet.tracing.spans import gateway_resource, origin_of, spans_of

log = logging.getLogger(__name__)

_SEND_S = 5
_CLOSE_S = 2  # for the last spans
_QUEUE = 8192  # spans: one second of a busy gateway
_BATCH = 512
_BATCH_MS = 200


class TraceExporter:
    """Exporter that sends a sample of a gateway's ended requests to a collector, as traces.

    While the collector is unreachable, the oldest spans are dropped. No request waits for the
    exporter.

    endpoint: OTLP/HTTP address of the collector, without /v1/traces. Its headers and certificates
        come from OTEL_EXPORTER_OTLP_ variables.
    share: fraction of requests to trace, 0 to 1.
    gateway: the gateway's name.
    """

    def __init__(self, endpoint: str, share: float, gateway: str) -> None:
        self._share = share
        self._gateway = gateway_resource(gateway)
        sender = _Sender(f"{endpoint.rstrip('/')}/v1/traces")
        self._queue = BatchSpanProcessor(sender, _QUEUE, _BATCH_MS, _BATCH)

    def ended(self, record: RequestRecord) -> None:
        """Queue the spans of an ended request for sending, if it had a valid key and is sampled."""
        if record.tenant is None:  # no valid key: anybody can send such requests
            return
        origin = origin_of(record.request_id, record.traceparent, self._share)
        if origin is not None:
            for span in spans_of(origin, record, self._gateway):
                self._queue.on_end(span)

    async def close(self) -> None:
        """Send the remaining spans; wait at most _CLOSE_S seconds for the collector."""
        # daemon thread: the queue waits half a minute for an unreachable collector
        last = threading.Thread(target=self._queue.shutdown, daemon=True)
        last.start()
        await asyncio.to_thread(last.join, _CLOSE_S)


class _Sender(SpanExporter):
    """Sender of spans to the trace collector. Logs once when the collector fails, and once when it
    recovers.
    """

    def __init__(self, url: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs each failure
        self._url = url
        self._exporter = OTLPSpanExporter(url, timeout=_SEND_S)
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            log.warning("collector_unreachable", extra={"collector": self._url})
        elif self._failing and not failed:
            log.info("collector_reachable", extra={"collector": self._url})
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
