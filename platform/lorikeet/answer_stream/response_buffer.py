"""What replicas say in answer to a gateway's calls, and the clients have not been told yet."""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from lorikeet.answer_stream.response_stream import DeltaGroup, joined
from lorikeet.protocol.messages import StreamItem

DELTAS_PER_S = 5_000
"""Pieces of streams that one gateway passes on in a second; what is in a piece hardly matters.

From `make bench-gateway`: a piece takes 0.12 ms of CPU from replica to client behind HAProxy, 0.26
behind Serve's own proxy.
"""


class ResponseBuffer:
    """What has come of one call's answer. Lives on one event loop.

    Between here and a client nothing holds a piece back, so pieces that come too often for this
    gateway would queue up where they cannot be joined. So they are joined here: `rest_s` says how
    long after a piece was taken the next one is ready. The first and the last never wait.
    ended: whether all has come, taken or not. replica: the one that answers, as soon as it has.
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
        """Add what is new, and wake the taker when it is time."""
        self._items += items
        self.ended = self.ended or ended
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come; what has ended stays whole."""
        if not self.ended:
            self._error = error
            self._wake()

    async def take(self) -> list[StreamItem]:
        """All that has come, at least one item; none at the end. Raises what it failed with."""
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
        """The place of a call's answer."""
        buffer = self._open[request_id] = ResponseBuffer(self._rest_s)
        try:
            yield buffer
        finally:
            del self._open[request_id]

    def sort(self, replica: str, groups: Iterable[DeltaGroup]) -> None:
        """Take what a replica says. What nobody waits for any more is dropped."""
        for request_id, items, ended in groups:
            buffer = self._open.get(request_id)
            if buffer is not None:
                buffer.replica = replica
                buffer.put(items, ended=ended)

    def awaits(self, replica: str) -> bool:
        """Whether an answer of this replica has begun and not ended."""
        return any(buffer.replica == replica for buffer in self._open.values())

    def _rest_s(self) -> float:
        """Between two pieces of a stream, so that this gateway can pass on those of all streams."""
        return len(self._open) / DELTAS_PER_S
