"""The response to a generate request: a replica's bytes, passed on as they arrive."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, nullcontext
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lorikeet.apis.answer import failed_event
from lorikeet.errors import GenerationFailed, LorikeetError, Unavailable
from lorikeet.gateway.client_connection import EVENT_END, KeptAliveStream, run_until_disconnect
from lorikeet.gateway.error_responses import OK, Refused
from lorikeet.logs import log_unexpected
from lorikeet.protocol.messages import (
    AnswerHeader,
    Call,
    FinalUsage,
    Refusal,
    Resumed,
    StreamItem,
)

Headers = Sequence[tuple[bytes, bytes]]
Items = AsyncGenerator[StreamItem, None]
BeforeEnd = Callable[[bytes], Awaitable[bytes]]
"""Function that gets an answer's last bytes before they are sent, and returns the bytes to send.

The last bytes are a whole JSON body, or the complete events that a stream has after its FinalUsage.
"""

RESUMED_HEADER = "x-lorikeet-resumed"
"""Header with the reasons why other replicas went on with the answer, in order. In a stream that
has begun, a comment of server-sent events, which clients skip, takes the header's place.
"""
_COMMENT, _RESUMED = b":", RESUMED_HEADER.encode()
_SILENT = "the replica ended without an answer: send the request again"


class RequestObserver(AbstractContextManager[Any], Protocol):
    """Observer of one call: entered when the call starts, left when the call ends for any reason.

    Entering may refuse the call with a LorikeetError. If a call completes, its observers get a
    FinalUsage before they are left.
    """

    def on_item(self, item: StreamItem) -> None:
        """Take note of an item of the replica's stream other than bytes.

        A Refusal can come instead of an answer, or in the middle of one.
        """
        ...

    def on_first_bytes(self) -> None:
        """Record that the answer's first bytes have arrived."""
        ...

    def headers(self) -> Headers:
        """Return headers to add to the response."""
        ...


class ReplicaResponse(Response):
    """Response that runs one call on a replica and sends its answer to the client.

    Nothing is sent before the replica's first bytes arrive, so an earlier failure gets its own HTTP
    status; a later failure ends a stream with an error event. If a stream has no bytes for
    KEEP_ALIVE_S seconds, the client gets headers and a keep-alive event, and from then on a failure
    as an error event. When the client disconnects, `items` is closed at once. Both are in
    client_connection.py.

    call: the call.
    items: the replica's answer.
    observers: observers of the call, entered in order and left in reverse. More can be appended
        before the call runs.
    first_item_timeout_s: longest wait for the replica's first item, in seconds.
    before_end: gets the last bytes of an answer that has not failed, and returns the bytes to send
        instead. Raises nothing.
    using: context around the call, entered before the observers and left after them; the caller's
        way to count the adapter as in use.
    """

    background = None

    def __init__(
        self,
        call: Call,
        items: Items,
        observers: Sequence[RequestObserver],
        first_item_timeout_s: float,
        before_end: BeforeEnd | None = None,
        using: AbstractContextManager[None] | None = None,
    ) -> None:
        self.call = call
        self._items = items
        self.observers = list(observers)
        self._first_item_timeout_s = first_item_timeout_s
        self._before_end = before_end
        self._using = using or nullcontext()
        self._ending = False
        self._header: AnswerHeader | None = None
        self._resumed: list[str] = []
        self._failure_sent = False

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises LorikeetError only before anything is sent."""
        try:
            with self._using, ExitStack() as left_at_the_end:
                for observer in self.observers:
                    left_at_the_end.enter_context(observer)
                await run_until_disconnect(receive, self._answer(send))
        except LorikeetError:
            if not self._failure_sent:
                raise

    async def _answer(self, send: Send) -> None:
        async with aclosing(self._items) as items:
            if self.call.stream:
                await self._stream(items, send)
                return
            first = await self._begin(items)
            body = first + b"".join([self._bytes(item) async for item in items])
            if self._before_end is not None:
                body = await self._before_end(body)
            await send(self._start(b"application/json", len(body)))
            await send(_body(body, more=False))

    async def _stream(self, items: Items, send: Send) -> None:
        """Send a stream. Raises LorikeetError for a failure before its first bytes.

        If a keep-alive event has already sent the headers, the client gets that failure as an error
        event.
        """

        def start() -> Message | None:
            accepted = self._header is not None
            return self._start(b"text/event-stream; charset=utf-8") if accepted else None

        with KeptAliveStream(send, self.call.endpoint, start) as stream:
            try:
                first = await self._begin(items)
            except LorikeetError as error:
                if stream.started:
                    self._failure_sent = True
                    await stream.send(_body(failed_event(self.call, 0, error), more=False))
                raise
            async for message in self._bodies(first, items):
                await stream.send(message)

    async def _begin(self, items: Items) -> bytes:
        """Return the first bytes of the answer; set `_header` to the last AnswerHeader before those
        bytes.

        A replica sends two AnswerHeaders before its first bytes. If the replica dies, another
        replica takes over and sends further AnswerHeaders.

        Raises Refused or, if no bytes come, another LorikeetError.
        """
        try:
            async with asyncio.timeout(self._first_item_timeout_s) as limit:
                async for item in items:
                    if isinstance(item, AnswerHeader):
                        self._header = item
                        limit.reschedule(None)  # the client decides how long to wait for the work
                    if first := self._bytes(item):
                        for observer in self.observers:
                            observer.on_first_bytes()
                        return first
        except TimeoutError as error:
            raise Unavailable(
                f"no replica took this request in {self._first_item_timeout_s:g} s: send it again"
            ) from error
        raise GenerationFailed(_SILENT)

    async def _bodies(self, first: bytes, items: Items) -> AsyncGenerator[Message, None]:
        """Yield a stream's ASGI messages, each of which is one write to the client's connection.

        The last message has the events after FinalUsage, or an error event.

        first: the answer's first bytes.
        items: the items after them.
        """
        events, last = 0, list[bytes]()
        try:
            if self._ending:
                last.append(first)
            else:
                yield _body(first, more=True)
                events = first.count(EVENT_END)
            async for item in items:
                chunk = self._bytes(item)
                if isinstance(item, Resumed):
                    reason = item.reason.encode()
                    yield _body(b"%s %s: %s\n\n" % (_COMMENT, _RESUMED, reason), more=True)
                elif self._ending:
                    last.append(chunk)
                elif chunk:
                    yield _body(chunk, more=True)
                    events += chunk.count(EVENT_END)
            if last and self._before_end is not None:
                last = [await self._before_end(b"".join(last))]
        except LorikeetError as error:
            last = [failed_event(self.call, events, error)]
        except Exception as error:
            log_unexpected("stream_failed", self.call.request_id, error)
            last = [failed_event(self.call, events, GenerationFailed(_SILENT))]
        yield _body(b"".join(last), more=False)

    def _bytes(self, item: StreamItem) -> bytes:
        """Return an item's bytes for the client; pass an item without bytes to the observers, and
        return b"".

        Raises Refused if the item is a Refusal.
        """
        if isinstance(item, bytes):
            return item
        self._ending = self._ending or isinstance(item, FinalUsage)
        for observer in self.observers:
            observer.on_item(item)
        if isinstance(item, Refusal):
            raise Refused(item, self.call)
        if isinstance(item, Resumed):
            self._resumed.append(item.reason)
        return b""

    def _start(self, content_type: bytes, length: int | None = None) -> Message:
        assert self._header is not None, "a header comes before bytes"
        headers = [(b"content-type", content_type), *_headers(self._header)]
        if self._resumed:
            headers.append((RESUMED_HEADER.encode(), ", ".join(self._resumed).encode()))
        if length is None:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", b"%d" % length))
        for observer in self.observers:
            headers += observer.headers()
        return {"type": "http.response.start", "status": OK, "headers": headers}


def _headers(header: AnswerHeader) -> Headers:
    """Return the response headers that describe how the request was served: the replica, the
    adapter's digest, residency and load time, and the request fields that had no effect.
    """
    headers = [(b"x-lorikeet-replica", header.replica.encode())]
    if header.digest is not None:
        headers.append((b"x-lorikeet-adapter-digest", header.digest.encode()))
    if header.residency is not None:
        headers.append((b"x-lorikeet-residency", str(header.residency).encode()))
    if header.digest is not None and header.load_s is not None:
        headers.append((b"x-lorikeet-adapter-load-ms", b"%d" % round(1000 * header.load_s)))
    return [*headers, *ignored_header(header.ignored)]


def ignored_header(names: Sequence[str]) -> Headers:
    """Return the header that names the request fields that had no effect; nothing if all had."""
    return [(b"x-lorikeet-ignored", ", ".join(names).encode())] if names else []


def _body(chunk: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": more}
