"""Logging handler that sends records to an OpenTelemetry collector, as OTLP logs over HTTP."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import ReadableLogRecord, ReadWriteLogRecord
from opentelemetry.sdk._logs.export import (
    BatchLogRecordProcessor,
    LogRecordExporter,
    LogRecordExportResult,
)

from lorikeet.tracing.spans import gateway_resource

_SEND_S = 5
_CLOSE_S = 2  # for the last records
_QUEUE, _BATCH, _BATCH_MS = 8192, 512, 200


class CollectorHandler(logging.Handler):
    """Handler that sends each record, an event with members, from a background thread.

    While the collector is unreachable, the oldest records are dropped.
    """

    def __init__(self, endpoint: str, gateway: str, on_lost: Callable[[int], None]) -> None:
        """Begin to send.

        endpoint: OTLP/HTTP address of the collector, without /v1/logs. Its headers and certificates
            come from OTEL_EXPORTER_OTLP_ variables.
        gateway: the gateway's name.
        on_lost: called in the thread with the number of records that could not be sent.
        """
        super().__init__()
        self._resource = gateway_resource(gateway)
        sender = _Sender(f"{endpoint.rstrip('/')}/v1/logs", on_lost)
        self._queue = BatchLogRecordProcessor(sender, _BATCH_MS, _BATCH, max_queue_size=_QUEUE)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record: its message names the event, its other members are attributes."""
        now_ns = time.time_ns()
        sent = LogRecord(
            timestamp=int(record.created * 1e9),
            observed_timestamp=now_ns,
            severity_number=SeverityNumber.INFO,
            severity_text="INFO",
            event_name=record.msg,
            body=record.msg,
            attributes=_attributes(record.__dict__),
        )
        self._queue.on_emit(ReadWriteLogRecord(sent, self._resource))

    def close(self) -> None:
        """Send the remaining records; wait at most _CLOSE_S seconds for the collector."""
        # daemon thread: the queue waits half a minute for an unreachable collector
        last = threading.Thread(target=self._queue.shutdown, daemon=True)
        last.start()
        last.join(_CLOSE_S)
        super().close()


class _Sender(LogRecordExporter):
    def __init__(self, url: str, on_lost: Callable[[int], None]) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs each failure
        self._exporter, self._on_lost = OTLPLogExporter(url, timeout=_SEND_S), on_lost

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        result = self._exporter.export(batch)
        if result is not LogRecordExportResult.SUCCESS:
            self._on_lost(len(batch))
        return result

    def force_flush(self, timeout_millis: int = 0) -> bool:  # noqa: ARG002 (holds nothing back)
        return True

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


_OF_EVERY_RECORD = frozenset(logging.makeLogRecord({}).__dict__)


def _attributes(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's own members, those of mappings by names such as made.tenant."""
    found = dict[str, Any]()
    for name, value in members.items():
        if name not in _OF_EVERY_RECORD and value is not None:
            inner = value.items() if isinstance(value, Mapping) else [("", value)]
            found |= {f"{name}.{each}".rstrip("."): one for each, one in inner}
    return found
