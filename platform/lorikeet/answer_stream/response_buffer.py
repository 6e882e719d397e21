"""The gateway's end of answers: what replicas have sent and clients have not been sent yet."""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from lorikeet.answer_stream.response_stream import DeltaGroup, joined
from lorikeet.protocol.messages import StreamItem

DELTAS_PER_S = 5_000
"""Deltas of streams that one gateway passes on in a second; their size hardly matters.

From `make bench-gateway`: a delta takes 0.12 ms of CPU from replica to client behind HAProxy, 0.26
behind Serve's own proxy.
"""


class ResponseBuffer:
    """The items of one call's answer that have come. Lives on one event loop.

    Between here and a client nothing holds a delta back, so deltas that come too often for this
    gateway would queue up where they cannot be joined. They are joined here instead: `rest_s` says
    how long after a delta was taken the next one is ready. The first and the last never wait.
    ended: whether all has come, taken or not. replica: the one that answers, once it has.
    """

    def __init__(self, rest_s: Callable[[], float]) -> None:
        self._items: list[StreamItem] = []
        self._ready = asyncio.Event()
        self._rest_s = rest_s
        self._taken_s = -math.inf
        self._waking: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        self.ended = False
        self.replica: str | None = None

    def put(self, items: Iterable[StreamItem], *, ended: bool) -> None:
        """Add new items, and wake the taker when it is time."""
        self._items += items
        self.ended = self.ended or ended
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End an answer of which no more will come; one that has ended stays whole."""
        if not self.ended:
            self._error = error
            self._wake()

    async def take(self) -> list[StreamItem]:
        """Return all new items, at least one; none at the end. Raises what `fail` was given."""
        await self._ready.wait()
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        items, self._items = self._items, []
        if items:
            if isinstance(items[-1], bytes):
                self._taken_s = asyncio.get_running_loop().time()
            if not self.ended and self._error is None:
                self._ready.clear()
        elif not self.ended:
            assert self._error is not None
            raise self._error
        return joined(items)

    def _wake(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = self._taken_s + self._rest_s()
        if self.ended or self._error is not None or due_s <= loop.time():
            self._ready.set()
        elif self._waking is None:
            self._waking = loop.call_at(due_s, self._ready.set)


class ResponseBuffers:
    """The buffers of all calls that a gateway has made."""

    def __init__(self) -> None:
        self._open: dict[str, ResponseBuffer] = {}

    @contextmanager
    def opened(self, request_id: str) -> Iterator[ResponseBuffer]:
        """Open the buffer of a call's answer for as long as the context lasts."""
        buffer = self._open[request_id] = ResponseBuffer(self._rest_s)
        try:
            yield buffer
        finally:
            del self._open[request_id]

    def deliver(self, replica: str, groups: Iterable[DeltaGroup]) -> None:
        """Put what a replica sent into its calls' buffers; drop what is for closed ones."""
        for request_id, items, ended in groups:
            buffer = self._open.get(request_id)
            if buffer is not None:
                buffer.replica = replica
                buffer.put(items, ended=ended)

    def awaits(self, replica: str) -> bool:
        """Whether an answer of this replica has begun and not ended."""
        return any(buffer.replica == replica for buffer in self._open.values())

    def _rest_s(self) -> float:
        """Return how far apart deltas of one stream must be for this gateway to pass on all."""
        return len(self._open) / DELTAS_PER_S
