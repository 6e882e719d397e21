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

_SEND_S = 40  # for six attempts to send a batch, with pauses of 31 s in all
_CLOSE_S = 2  # for the last records
_QUEUE, _BATCH, _BATCH_MS = 8192, 512, 200


class CollectorHandler(logging.Handler):
    """Handler that sends each record, an event with members, from a background thread.

    A batch of records is lost if the collector refuses it, or is away for half a minute. While
    _QUEUE records wait, a further one is lost.
    """

    def __init__(self, endpoint: str, gateway: str, on_lost: Callable[[int], None]) -> None:
        """Begin to send.

        endpoint: OTLP/HTTP address of the collector, without /v1/logs. Its headers and certificates
            come from OTEL_EXPORTER_OTLP_ variables.
        gateway: the gateway's name.
        on_lost: called with the number of records that were lost, in any thread.
        """
        super().__init__()
        self._resource, self._on_lost = gateway_resource(gateway), on_lost
        self._sender = _Sender(f"{endpoint.rstrip('/')}/v1/logs", on_lost)
        self._queue = BatchLogRecordProcessor(
            self._sender, _BATCH_MS, _BATCH, max_queue_size=_QUEUE
        )

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
        if self._sender.expect():
            self._queue.on_emit(ReadWriteLogRecord(sent, self._resource))
        else:
            self._on_lost(1)

    def close(self) -> None:
        """Send the remaining records; those that take more than _CLOSE_S seconds are lost."""
        # daemon thread: the queue waits half a minute for an unreachable collector
        last = threading.Thread(target=self._queue.shutdown, daemon=True)
        last.start()
        last.join(_CLOSE_S)
        if left := self._sender.give_up():
            self._on_lost(left)
        super().close()


class _Sender(LogRecordExporter):
    """Sender of batches. Counts the records that are not sent yet, since the queue drops records
    silently: the oldest if it is full, all at its end.
    """

    def __init__(self, url: str, on_lost: Callable[[int], None]) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs each failure
        self._exporter, self._on_lost = OTLPLogExporter(url, timeout=_SEND_S), on_lost
        self._lock = threading.Lock()
        self._unsent = 0

    def expect(self) -> bool:
        """Count a record that is about to be queued; return False if the queue is full."""
        with self._lock:
            has_room = self._unsent < _QUEUE
            self._unsent += has_room
        return has_room

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        result = self._exporter.export(batch)
        with self._lock:
            is_given_up = not self._unsent
            self._unsent = max(0, self._unsent - len(batch))
        if result is not LogRecordExportResult.SUCCESS and not is_given_up:
            self._on_lost(len(batch))
        return result

    def give_up(self) -> int:
        """Return the number of records that are not sent, which `export` then does not report."""
        with self._lock:
            left, self._unsent = self._unsent, 0
        return left

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
