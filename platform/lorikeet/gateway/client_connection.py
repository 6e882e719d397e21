"""Connection of a waiting client: its disconnect, which cancels the work, and keep-alive events.

Proxies and clients close silent connections.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from typing import Any, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

from lorikeet.protocol.messages import Endpoint

T = TypeVar("T")

KEEP_ALIVE_S = 15.0
"""Seconds without a byte after which a stream's client is sent a keep-alive event."""
EVENT_END = b"\n\n"
_COMMENT = b": keep-alive\n\n"
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'


async def run_until_disconnect(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work` in the current task; if the client disconnects, cancel `work` and wait until it
    has ended.

    receive: source of the ASGI messages of a request whose body has been read.

    After a disconnect this function returns normally, with the task's cancellation taken back.
    """
    current = asyncio.current_task()
    assert current is not None
    disconnected = False

    async def cancel_on_disconnect() -> None:
        nonlocal disconnected
        with suppress(Exception):  # a connection lost in another way is a disconnect too
            await wait_for_disconnect(receive)
        disconnected = True
        current.cancel()

    watcher = asyncio.create_task(cancel_on_disconnect())
    try:
        await work
    except asyncio.CancelledError:
        if not disconnected or current.uncancel():
            raise  # the server cancels this request itself
    finally:
        watcher.cancel()


async def result_before_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Raises ClientDisconnect, after cancelling `work`, if the client
    disconnects first.

    receive: source of the ASGI messages of a request whose body has been read.
    """
    results = list[T]()

    async def run() -> None:
        results.append(await work)

    await run_until_disconnect(receive, run())
    if not results:
        raise ClientDisconnect
    return results[0]


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnects.

    receive: source of the ASGI messages of a request whose body has been read.
    """
    while (await receive())["type"] != "http.disconnect":
        pass


class KeptAliveStream(AbstractContextManager["KeptAliveStream"]):
    """Sender of a stream's ASGI messages; writes a keep-alive event after KEEP_ALIVE_S seconds
    without a message.

    The event is a comment of server-sent events, or Anthropic's `ping`; clients skip both. A
    keep-alive event never interrupts another event. For one event loop.

    started: whether the response's headers were sent.
    """

    def __init__(self, send: Send, endpoint: Endpoint, start: Callable[[], Message | None]) -> None:
        """Begin to wait for the first message.

        endpoint: called endpoint, which decides the keep-alive event.
        start: returns the message with the response's headers; None: a keep-alive event must not
            be sent yet, since the request may still be refused by its HTTP status.
        """
        self.started = False
        self._send, self._start = send, start
        self._event = _PING if endpoint is Endpoint.MESSAGES else _COMMENT
        self._between_events = True
        self._lock = asyncio.Lock()  # held while a message is written
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()
        self._keeping: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._on_timer)

    def __enter__(self) -> Self:
        """Return the stream."""
        return self

    def __exit__(self, *_: object) -> None:
        """Send no more keep-alive events."""
        self._timer.cancel()
        if self._keeping is not None:
            self._keeping.cancel()

    async def send(self, message: Message) -> None:
        """Send a message of the response's body; before the first one, send the headers."""
        async with self._lock:
            if not self.started:
                begun = await self._begin()
                assert begun, "a body comes after an answer's header"
            await self._write(message)

    async def _begin(self) -> bool:
        """Send the headers unless they were sent; return False if they must not be sent yet."""
        if not self.started:
            start = self._start()
            if start is None:
                return False
            self.started = True
            await self._send(start)
        return True

    async def _write(self, message: Message) -> None:
        await self._send(message)
        self._between_events = message["body"].endswith(EVENT_END)
        self._sent_s = self._loop.time()

    async def _keep_alive(self) -> None:
        """Send a keep-alive event, unless a message was sent while this method waited for
        the lock.
        """
        async with self._lock:
            if self._idle_s() >= KEEP_ALIVE_S and self._between_events and await self._begin():
                body = {"type": "http.response.body", "body": self._event, "more_body": True}
                await self._write(body)

    def _idle_s(self) -> float:
        return self._loop.time() - self._sent_s

    def _on_timer(self) -> None:
        left_s = KEEP_ALIVE_S - self._idle_s()
        if left_s <= 0:
            left_s = KEEP_ALIVE_S
            if not self._lock.locked():
                self._keeping = self._loop.create_task(self._keep_alive())
        self._timer = self._loop.call_later(left_s, self._on_timer)
