"""Messages that keep an idle stream's connection open: proxies and clients close silent ones."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Self

from starlette.types import Message, Send

from lorikeet.protocol.messages import Endpoint

KEEP_ALIVE_S = 15.0
"""Seconds without a byte after which a stream's client is sent a keep-alive event."""
EVENT_END = b"\n\n"
_COMMENT = b": keep-alive\n\n"
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'


class KeptAliveStream(AbstractContextManager["KeptAliveStream"]):
    """Sender of a stream's ASGI messages that writes a keep-alive event after each KEEP_ALIVE_S.

    The event is a comment of server-sent events, or Anthropic's `ping`; clients skip both. It never
    stands inside another event. A stream whose bytes flow costs one timer. For one event loop.

    started: whether the response's headers were sent.
    """

    def __init__(self, send: Send, endpoint: Endpoint, start: Callable[[], Message | None]) -> None:
        """Begin to wait for the first message.

        start: returns the message with the response's headers; None: a keep-alive event must not
            be sent yet, since the request may still be refused by its HTTP status.
        """
        self.started = False
        self._send, self._start = send, start
        self._event = _PING if endpoint is Endpoint.MESSAGES else _COMMENT
        self._between_events = True
        self._sending: asyncio.Task[None] | bool = False  # a task: of a keep-alive event
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._on_timer)

    def __enter__(self) -> Self:
        """Return the stream."""
        return self

    def __exit__(self, *_: object) -> None:
        """Send no more keep-alive events."""
        self._timer.cancel()
        if isinstance(self._sending, asyncio.Task):
            self._sending.cancel()

    async def send(self, message: Message) -> None:
        """Send a message of the response's body; before the first one, send the headers."""
        if isinstance(self._sending, asyncio.Task):
            with suppress(Exception):  # a lost connection shows below too
                await self._sending
        self._sending = True
        try:
            await self._send_body(message)
        finally:
            self._sending = False

    async def _send_body(self, message: Message) -> None:
        if not self.started:
            start = self._start()
            assert start is not None, "the answer has begun"
            self.started = True
            await self._send(start)
        await self._send(message)
        self._between_events = message["body"].endswith(EVENT_END)
        self._sent_s = self._loop.time()

    async def _send_event(self) -> None:
        try:
            body = {"type": "http.response.body", "body": self._event, "more_body": True}
            await self._send_body(body)
        finally:
            self._sending = False

    def _on_timer(self) -> None:
        due_s = self._sent_s + KEEP_ALIVE_S
        if self._loop.time() < due_s:
            self._timer = self._loop.call_at(due_s, self._on_timer)
            return
        may_start = self.started or self._start() is not None
        if self._between_events and not self._sending and may_start:
            self._sending = self._loop.create_task(self._send_event())
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._on_timer)
