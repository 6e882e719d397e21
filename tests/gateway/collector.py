"""Minimal OpenTelemetry collector that keeps spans and logs that it receives by OTLP over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True)
class Told:
    """A span as it arrived. parent: id of its parent span; empty for none."""

    name: str
    trace_id: str
    id: str
    parent: str
    kind: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    error: str | None

    @property
    def took_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass
class Collector:
    url: str
    status: int = 200
    spans: list[Told] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    logs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # events, attributes

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _plain(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_told(span, resource) for span in scope.spans]

    def take_logs(self, body: bytes) -> None:
        for group in ExportLogsServiceRequest.FromString(body).resource_logs:
            for scope in group.scope_logs:
                self.logs += [
                    (each.event_name, _plain(each.attributes)) for each in scope.log_records
                ]

    def of(self, trace_id: str) -> list[Told]:
        """Return a trace's spans, each before its children, in the order of time."""
        spans = [span for span in self.spans if span.trace_id == trace_id]
        spans.sort(key=lambda span: (span.begin_ns, span.end_ns))
        known = {span.id for span in spans}
        roots = [span for span in spans if span.parent not in known]
        return [each for root in roots for each in _down(root, spans)]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            take = {"/v1/traces": collector.take, "/v1/logs": collector.take_logs}[self.path]
            take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _down(span: Told, spans: list[Told]) -> Iterator[Told]:
    yield span
    for child in spans:
        if child.parent == span.id:
            yield from _down(child, spans)


def _told(span: Span, resource: dict[str, Any]) -> Told:
    failed = span.status.code == Status.STATUS_CODE_ERROR
    return Told(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _plain(span.attributes),
        resource,
        span.status.message if failed else None,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in attributes}


def _value(pair: KeyValue) -> Any:
    return getattr(pair.value, pair.value.WhichOneof("value"))
