"""The answer to a generate request: a replica's bytes, passed on as they come."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractContextManager, aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lorikeet.api.answers import failed_event
from lorikeet.api.errors import OK, Refused
from lorikeet.api.messages import Call, Header, Refusal, StreamItem
from lorikeet.api.request_scope import log_unexpected
from lorikeet.errors import GenerationFailed, LorikeetError, Unavailable

Items = AsyncGenerator[StreamItem, None]

_SILENT = "the replica ended without an answer: send the request again"


class Generation(Response):
    """Runs one call and sends its answer.

    Nothing is sent before the replica's first bytes are there, so whatever fails until then gets
    a status of its own; later failures end a stream with an error event. A client that goes away
    closes `items` at once. `place` is entered when the call starts and left when it ends.
    """

    background = None

    def __init__(
        self,
        call: Call,
        items: Items,
        place: AbstractContextManager[None],
        first_item_timeout_s: float,
    ) -> None:
        self._call = call
        self._items = items
        self._place = place
        self._first_item_timeout_s = first_item_timeout_s

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises LorikeetError only while nothing was sent."""
        with self._place:
            await _while_connected(receive, self._answer(send))

    async def _answer(self, send: Send) -> None:
        async with aclosing(self._items) as items:
            header, first = await self._begin(items)
            if self._call.stream:
                await send(_start(header, b"text/event-stream; charset=utf-8"))
                async for chunk in self._chunks(first, items):
                    await send(_body(chunk, more=True))
                await send(_body(b"", more=False))
            else:
                body = first + b"".join([_bytes(item) async for item in items])
                await send(_start(header, b"application/json", len(body)))
                await send(_body(body, more=False))

    async def _begin(self, items: Items) -> tuple[Header, bytes]:
        """Wait for the first bytes. A replica that takes over from a dead one sends its header."""
        header: Header | None = None
        try:
            async with asyncio.timeout(self._first_item_timeout_s) as limit:
                async for item in items:
                    limit.reschedule(None)  # somebody is at work: how long it takes is the client's
                    if not isinstance(item, Header):
                        first = _bytes(item)
                        assert header is not None, "a header comes before bytes"
                        return header, first
                    header = item
        except TimeoutError as error:
            raise Unavailable(
                f"no replica took this request in {self._first_item_timeout_s:g} s: send it again"
            ) from error
        raise GenerationFailed(_SILENT)

    async def _chunks(self, first: bytes, items: Items) -> AsyncGenerator[bytes, None]:
        yield first
        try:
            async for item in items:
                yield _bytes(item)
        except LorikeetError as error:
            yield failed_event(error.code, error.message, error.param)
        except Exception as error:
            log_unexpected("stream_failed", self._call.request_id, error)
            yield failed_event(GenerationFailed.code, _SILENT)


async def _while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work`; cancel it, and wait for its end, when the client goes away."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
    finally:  # also when the server cancels this request itself
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _bytes(item: StreamItem) -> bytes:
    if isinstance(item, Refusal):
        raise Refused(item)
    assert isinstance(item, bytes)
    return item


def _start(header: Header, content_type: bytes, length: int | None = None) -> Message:
    headers = [(b"content-type", content_type), (b"x-lorikeet-replica", header.replica.encode())]
    if length is None:
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    else:
        headers.append((b"content-length", b"%d" % length))
    if header.digest is not None:
        headers.append((b"x-lorikeet-adapter-digest", header.digest.encode()))
    if header.residency is not None:
        headers.append((b"x-lorikeet-residency", str(header.residency).encode()))
    return {"type": "http.response.start", "status": OK, "headers": headers}


def _body(chunk: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": more}
