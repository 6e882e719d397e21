"""Audit stream: a line of JSON, or an OTLP log record, for each change that a valid key asks the
admin API for.
"""

import json
import logging
import logging.handlers
import sys
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.catalog.records import KeyRecord
from lorikeet.gateway.error_responses import CREATED
from lorikeet.logs import JsonLines

log = logging.getLogger(__name__)

STDOUT = "stdout"
"""Value of the setting that sends the stream to the process's standard output."""
_PREFIX = "/admin/v1"
_READING = ("GET", "HEAD")
_NAMES = ("id", "tenant", "adapter", "version")
"""Members of a 201's body that name what the request has made."""
_LONGEST_SUBJECT = 200  # characters
_LONGEST_ANSWER = 64 * 2**10  # bytes


class AuditStream:
    """Writer of a gateway's audit stream, the record of admins' changes. Each line is an event
    `admin_action`.

    A line that cannot be written or sent is lost; the event `audit_not_written` in the log says so.
    """

    def __init__(self, to: str, gateway: str) -> None:
        """Open the stream. Raises OSError if the file cannot be opened.

        to: `stdout`; or address of an OpenTelemetry collector, which gets OTLP logs; or path of a
            file that lines are appended to. Several processes may append to one file. A file that
            was moved or deleted is made again.
        gateway: the gateway's name.
        """
        self._handler, self._gateway = _handler(to, gateway), gateway

    def write(
        self, key: KeyRecord, request_id: str, action: str, subject: str, status: int, made: Any
    ) -> None:
        """Write one line.

        key: key of the request.
        action: method and route below /admin/v1, such as `PATCH /tenants/{tenant}`.
        subject: values of the route's parameters, joined by /.
        status: HTTP status of the answer; 0: the request was not answered.
        made: members of the answer that name what the request has made; None: it has made nothing.
        """
        record = logging.makeLogRecord(
            {
                "levelname": "INFO",
                "msg": "admin_action",
                "key": key.id,
                "key_name": key.name,
                "action": action,
                "subject": subject,
                "result": _result(status),
                "status": status,
                "made": made,
                "request_id": request_id,
                "gateway": self._gateway,
            }
        )
        self._handler.handle(record)

    def close(self) -> None:
        """Close the stream's file, or send what the collector has not got yet."""
        self._handler.close()


def is_collector(to: str) -> bool:
    """Return whether the stream goes to a collector's address, rather than a file or stdout."""
    return to.startswith(("http://", "https://"))


class AuditMiddleware:
    """Middleware that writes requests to the admin API other than GET and HEAD to the audit stream,
    refused ones included. A line is written before its answer ends.

    Requests without a valid key are not written.
    """

    def __init__(self, app: ASGIApp, stream: AuditStream) -> None:
        """Wrap an application.

        app: application around RequestMiddleware, which gives each request its id.
        stream: stream that the requests are written to.
        """
        self._app, self._stream = app, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application; write it to the stream if it asks for a change."""
        of_admin = scope["type"] == "http" and scope["path"].startswith(_PREFIX)
        if not of_admin or scope["method"] in _READING:
            await self._app(scope, receive, send)
            return
        status, answer, written = 0, bytearray(), False

        def write() -> None:
            nonlocal written
            key = scope["state"].get("key")
            if key is not None and not written:
                action = f"{scope['method']} {scope['route'].path}"
                subject = "/".join(scope["path_params"].values())[:_LONGEST_SUBJECT]
                request_id = scope["state"]["request_id"]
                self._stream.write(key, request_id, action, subject, status, _made(bytes(answer)))
            written = True

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                if status == CREATED and len(answer) < _LONGEST_ANSWER:
                    answer.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    write()
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            write()


class _Stream(logging.StreamHandler[TextIO]):
    """Logging handler that writes to a stream, and logs a failed write as an error."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802
        log.error("audit_not_written", extra={"error": repr(sys.exc_info()[1])})


class _File(_Stream, logging.handlers.WatchedFileHandler):
    """Logging handler of a file, which is opened again after it was moved or deleted."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # of opening the file again, which the base class lets pass
            self.handleError(record)


def _handler(to: str, gateway: str) -> logging.Handler:
    if is_collector(to):
        from lorikeet.tracing.log_exporter import CollectorHandler  # a second of imports

        return CollectorHandler(to, gateway, _log_lost)
    handler = _Stream(sys.__stdout__) if to == STDOUT else _File(to)
    handler.setFormatter(JsonLines())
    return handler


def _log_lost(records: int) -> None:
    error = f"the collector has refused {records} records, or is away: see its log"
    log.error("audit_not_written", extra={"error": error})


def _result(status: int) -> str:
    if status == 0:
        return "unanswered"
    return "done" if status < 400 else "refused" if status < 500 else "failed"


def _made(answer: bytes) -> dict[str, Any] | None:
    """Return the members of an answer's body that name what a request has made (_NAMES), without
    others such as a new key's secret; None if the body is no JSON.
    """
    try:
        body = json.loads(answer)
    except ValueError:
        return None
    return {name: body[name] for name in _NAMES if name in body}
