"""HTTP protocol of both listeners: uvicorn's, with limits that apply before the application runs.

The application limits bodies by size and time (body.py), but not what the server's parser accepts
before it: header lines, the parts of a chunked body, and connections on which no request arrives.
Serve's HTTP port gets this protocol from serving/proxy_middleware.py, the admin listener from
listeners.py.
"""

import asyncio
import json
import resource
import uuid
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from lorikeet.apis.errors import openai_error_body
from lorikeet.errors import (
    InvalidInput,
    LorikeetError,
    Overloaded,
    RequestTimeout,
    RequestTooLarge,
    status_of,
)
from lorikeet.retry_after import FULL_GATEWAY_S, whole_seconds

HEAD_S = 20.0
"""Seconds within which a request's headers must arrive, from the connection's start or from the
first byte after the previous request."""
MAX_HEAD_BYTES = 64 * 2**10
"""Limit on the bytes of a request outside its body: request line, headers, trailers, chunk sizes. A
body adds 1/16 of its own bytes to the limit.
"""
MAX_HEADERS = 256
"""Maximum number of header and trailer lines of a request."""
MAX_PARTS = 2048
"""Limit on the parts of a request's body, raised by one for each _PART_BYTES of the body. A part is
a chunk, or the piece of a chunk that one packet brings: the parser takes a microsecond for each
part of any size.
"""
_PART_BYTES = 256
MAX_PIPELINED = 8
"""Maximum number of requests of one connection that wait until an earlier one is answered."""
_FREE_READS, _READ_PAUSE_S = 64, 0.01
"""Slowing of clients that send a request in tiny pieces: number of reads below _SMALL_BYTES that a
request may need at full speed, and the pause in seconds after each further read.
"""
_SMALL_BYTES = 16 * 2**10
_FEED_BYTES = 64 * 2**10  # the parser gets at most so much between two checks
LINGER_S = 30.0
"""Seconds for which a connection stays open after an answer that was sent before its request had
wholly arrived. If the connection were closed while the client still sends, the client could lose
the answer (nginx's lingering_close).
"""
_MAX_REST_BYTES = 64 * 2**10
"""Maximum size of a body that is read to its end after an early answer, to reuse the connection."""
_OTHER_FILES = 256
"""Number of files that a process opens besides clients' connections. The limit on connections
leaves room for them.
"""
_HEAD_TOO_LARGE = (
    f"the request's headers, or its chunks beside their data, are larger than {MAX_HEAD_BYTES} "
    "bytes, the limit here"
)


_IdleConnections = dict["BoundedHttpProtocol", None]


class BoundedHttpProtocol(HttpToolsProtocol):
    """Connection of a client, closed once a request exceeds one of this module's limits.

    max_connections: maximum number of connections of each listener of this process.
    """

    max_connections: ClassVar[int] = 16_384
    _idle_of: ClassVar[WeakKeyDictionary[ServerState, _IdleConnections]] = WeakKeyDictionary()

    @classmethod
    def limit_connections(cls, most: int) -> None:
        """Set max_connections to `most`, or less if the process's limit on open files
        leaves less.
        """
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        left = most if files == resource.RLIM_INFINITY else max(1, files - _OTHER_FILES)
        cls.max_connections = min(most, left)

    def __init__(self, config: Config, server_state: ServerState, **options: Any) -> None:
        super().__init__(config, server_state, **options)
        # The listener's connections without a request that is being answered, idle longest first.
        self._idle = self._idle_of.setdefault(server_state, {})
        self._refusal: LorikeetError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = self._began = self._lingers = self._closes = False
        self._outside_bytes = self._body_bytes = self._body_parts = self._small_reads = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer: the client has HEAD_S seconds for the headers of its first request.

        If the listener has more than max_connections connections, the one that has been idle
        longest is closed or, if none is idle, the new connection is refused.
        """
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            if not self._idle:
                full = Overloaded("all connections of this server are in use: try again later")
                self.transport.write(_refusal(full, FULL_GATEWAY_S))
                self.transport.close()
                return
            longest = next(iter(self._idle))
            del self._idle[longest]
            longest.transport.abort()
        self._idle[self] = None
        self._set_timer(HEAD_S, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a connection that has ended."""
        self._cancel_timer()
        self._idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data in pieces; refuse a request that exceeds a limit."""
        if self._lingers:
            self._rest_before_next_read()
            return
        for start in range(0, len(data), _FEED_BYTES):
            piece = data[start : start + _FEED_BYTES] if len(data) > _FEED_BYTES else data
            before, within = self._body_bytes, self._in_head or not self._is_whole()
            super().data_received(piece)
            if self._lingers or self.transport.is_closing() or not self._is_speaking():
                return
            if not self._began:
                self._outside_bytes += len(piece) - (self._body_bytes - before)
            elif not within or self._in_head:
                self._outside_bytes = len(piece) - self._body_bytes
            self._began = False  # else the piece began with an earlier request's end
            if self._outside_bytes > MAX_HEAD_BYTES + self._body_bytes // 16:
                self._refuse(RequestTooLarge(_HEAD_TOO_LARGE))
                return
        if self._timer is None and (self._in_head or self._is_idle()):
            self._set_timer(HEAD_S, self._on_late_head)
        if self._in_head or not self._is_whole():
            self._small_reads += len(data) < _SMALL_BYTES
            if self._small_reads > _FREE_READS:
                self._rest_before_next_read()

    def on_message_begin(self) -> None:
        """Reset the counters of a request's bytes, body parts and small reads, for a new request.

        Raises an error, which refuses the request, if MAX_PIPELINED requests of the connection wait
        already.
        """
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refused(InvalidInput(f"more than {MAX_PIPELINED} requests in a pipeline"))
        self._outside_bytes = self._body_bytes = self._body_parts = self._small_reads = 0
        self._in_head = self._began = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Accept a header or trailer of a request. Raises an error, which refuses the request, if
        the request has too many headers and trailers.
        """
        if len(self.headers) >= MAX_HEADERS:
            problem = f"the request has more than {MAX_HEADERS} headers, the limit here"
            raise self._refused(RequestTooLarge(problem))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer the request. An answer sent before the body has arrived may close the
        connection.
        """
        self._in_head = False
        self._cancel_timer()
        self._idle.pop(self, None)
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            cycle = self.cycle
            cycle.send = partial(self._send, cycle, cycle.send)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        """Count a part of the body. Raises an error, which refuses the request, if the body has too
        many parts.
        """
        self._body_parts += 1
        self._body_bytes += len(body)
        if self._body_parts > MAX_PARTS + self._body_bytes // _PART_BYTES:
            problem = (
                f"the body comes in {self._body_parts} parts of {_PART_BYTES} bytes or less: send "
                "it in larger parts"
            )
            raise self._refused(InvalidInput(problem))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the whole body has arrived, even if the request was already answered."""
        super().on_message_complete()
        if self.cycle is not None and self.cycle.more_body:
            self.cycle.more_body = False
            self._cancel_timer()

    def on_response_complete(self) -> None:
        """Serve the connection's next request. If the answered request's body has not fully
        arrived, limit the wait for the rest or close the connection.
        """
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_idle():
            self._idle[self] = None
        if self._closes:
            self._linger()
        elif self._is_idle() and not self._is_whole():
            self._set_timer(HEAD_S, self._close)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser cannot read or that exceeds a limit."""
        self._refuse(self._refusal or InvalidInput(msg))

    async def _send(self, cycle: RequestResponseCycle, send: Any, message: dict[str, Any]) -> None:
        """Send a message of an answer. If a large body is still arriving, the answer's headers say
        that the connection will close.

        cycle: uvicorn's state of the request and its answer.
        """
        if message["type"] == "http.response.start" and cycle.more_body:
            self._closes = cycle.waiting_for_100_continue or not _is_small(cycle)
        if not self._closes or message["type"] != "http.response.start":
            await send(message)
            return
        others = [each for each in message.get("headers", ()) if each[0] != CLOSE_HEADER[0]]
        await send({**message, "headers": [*others, CLOSE_HEADER]})
        cycle.keep_alive = True  # on_response_complete closes, once the client has the answer

    def _is_whole(self) -> bool:
        return self.cycle is None or not self.cycle.more_body

    def _is_idle(self) -> bool:
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    def _is_speaking(self) -> bool:
        return self.transport.get_protocol() is self

    def _refused(self, error: LorikeetError) -> LorikeetError:
        """Return an error to raise in the parser's callback; send_400_response then sends it."""
        self._refusal = error
        return error

    def _refuse(self, error: LorikeetError) -> None:
        """Answer a request with an error, unless its answer has begun, and close the connection."""
        started = not self._is_idle() and self.cycle.response_started
        if self._is_idle() or not (started or self.pipeline or self._in_head):
            self.transport.write(_refusal(error))
        if not self._is_idle():
            self.cycle.disconnected = True  # its application can send nothing more
            self.cycle.message_event.set()
            self.pipeline.clear()
        self._linger()

    def _linger(self) -> None:
        """Close the connection when the client has read its answer, or after LINGER_S seconds.

        Until then, data from the client is dropped.
        """
        self._lingers = True
        self._idle.setdefault(self)
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(LINGER_S, self._close)

    def _rest_before_next_read(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()
            self.loop.call_later(_READ_PAUSE_S, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing() and (self._lingers or not self.flow.read_paused):
            self.transport.resume_reading()

    def _on_late_head(self) -> None:
        """Close a connection whose client did not send all headers in time."""
        self._timer = None
        if self._in_head and self._is_idle():
            self._refuse(RequestTimeout(f"the headers did not arrive within {HEAD_S:g} s"))
        else:
            self._close()

    def _close(self) -> None:
        self._timer = None
        self.transport.close()

    def _set_timer(self, after_s: float, then: Any) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(after_s, then)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _refusal(error: LorikeetError, retry_after_s: float | None = None) -> bytes:
    """Return the whole HTTP answer that refuses a request and announces the connection's end."""
    body = json.dumps(openai_error_body(error.code, error.message, error.param)).encode()
    retry = b"" if retry_after_s is None else b"retry-after: %d\r\n" % whole_seconds(retry_after_s)
    head = STATUS_LINE[status_of(error.code)] + (
        b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\n%s"
        b"connection: close\r\n\r\n" % (len(body), uuid.uuid4().hex.encode(), retry)
    )
    return head + body


def _is_small(cycle: RequestResponseCycle) -> bool:
    """Return whether a request's declared body is small enough to be read after an early answer."""
    for name, value in cycle.scope["headers"]:
        if name == b"content-length":
            return int(value) <= _MAX_REST_BYTES
    return False
