"""The exporter of spans: gathers them, and sends them by a thread of its own."""

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
_CLOSE_S = 2  # for what is left at the end
_QUEUE = 8192  # spans: a second of a busy gateway's
_BATCH = 512
_BATCH_MS = 200


class TraceExporter:
    """Sends a share of a gateway's ended requests as traces.

    endpoint: the collector's OTLP/HTTP address, to which /v1/traces is added; headers and
    certificates for it come from OTEL_EXPORTER_OTLP_ variables. While the collector is away, the
    newest spans are kept and the oldest dropped; no request waits for either.
    """

    def __init__(self, endpoint: str, share: float, gateway: str) -> None:
        self._share = share
        self._gateway = gateway_resource(gateway)
        sender = _Sender(f"{endpoint.rstrip('/')}/v1/traces")
        self._queue = BatchSpanProcessor(sender, _QUEUE, _BATCH_MS, _BATCH)

    def ended(self, record: RequestRecord) -> None:
        """Trace an ended request, if it is among the share."""
        if record.tenant is None:  # no key: anybody can send such requests
            return
        origin = origin_of(record.request_id, record.traceparent, self._share)
        if origin is not None:
            for span in spans_of(origin, record, self._gateway):
                self._queue.on_end(span)

    async def close(self) -> None:
        """Send what is left, if the collector takes it at once."""
        # a daemon thread: the queue itself waits half a minute for a collector that is away
        last = threading.Thread(target=self._queue.shutdown, daemon=True)
        last.start()
        await asyncio.to_thread(last.join, _CLOSE_S)


class _Sender(SpanExporter):
    """The collector. When it stops taking spans, and when it takes them again, is logged once."""

    def __init__(self, url: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it says so again and again
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
