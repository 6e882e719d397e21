"""The stream that a gateway keeps open from a replica, for all answers together: both its ends.

A step of the engine adds a delta to every answer. One call of Ray Serve for each delta costs a
replica's event loop 70 us, more than all the rest; hence one message for all of them. On a replica
an AnswerSender puts items into the gateway's ResponseStream; serving/engine_client.py reads the
stream and delivers them to ResponseBuffers, from which it takes each call's.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from lorikeet.protocol.messages import StreamItem
from lorikeet_engine.errors import EngineClosed

DeltaGroup = tuple[str, list[StreamItem], bool]
"""A request's id, the new items of its answer, and whether it has ended. Tuples pickle fast."""

_MESSAGE_BYTES = 2**18
"""About the size of the largest message, and of the parts that larger bytes are sent in.

gRPC ends a stream with a message above RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH, and with it all
answers on their way to that gateway.
"""
_OPENING_S = 5.0
DELTAS_PER_S = 5_000
"""Deltas of streams that one gateway passes on in a second; their size hardly matters.

From `make bench-gateway`: a delta takes 0.12 ms of CPU from replica to client behind HAProxy, 0.26
behind Serve's own proxy.
"""


class ResponseStream:
    """The new items of all answers to one gateway. Lives on one event loop.

    closed: whether the gateway takes no more.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[StreamItem]] = {}
        self._ended: set[str] = set()
        self._ready = asyncio.Event()
        self._unfinished = set[asyncio.Future[None]]()
        self.closed = False

    def put(self, request_id: str, items: Sequence[StreamItem], *, ended: bool = False) -> None:
        """Add new items of an answer; bytes that no message would hold are cut."""
        waiting = self._waiting.setdefault(request_id, [])
        for item in items:
            waiting += _cut(item) if isinstance(item, bytes) else (item,)
        if ended:
            self._ended.add(request_id)
        self._ready.set()

    async def take(self) -> list[DeltaGroup]:
        """Return new items, as many as a message holds; none only once the stream is closed."""
        await self._ready.wait()
        groups, size = list[DeltaGroup](), 0
        while self._waiting and size < _MESSAGE_BYTES:
            request_id = next(iter(self._waiting))
            waiting, count = self._waiting.pop(request_id), 0
            while count < len(waiting) and size < _MESSAGE_BYTES:
                item = waiting[count]
                size += len(item) if isinstance(item, bytes) else 0
                count += 1
            if rest := waiting[count:]:
                self._waiting[request_id] = rest  # behind the others, which need not wait for it
            ended = not rest and request_id in self._ended
            groups.append((request_id, joined(waiting[:count]), ended))
            if ended:
                self._ended.remove(request_id)
        if not self._waiting:
            self._ready.clear()
        return groups

    def close(self) -> None:
        """Wake `take`, and fail answers that have not ended."""
        self.closed = True
        self._ready.set()
        for ended in self._unfinished:
            if not ended.done():
                ended.set_exception(_gateway_gone())

    async def wait_for(self, ended: asyncio.Future[None]) -> None:
        """Wait until an answer has ended. Raises EngineClosed if it cannot reach its gateway."""
        if self.closed and not ended.done():
            raise _gateway_gone()
        self._unfinished.add(ended)
        try:
            await ended
        finally:
            self._unfinished.remove(ended)


class ResponseStreams:
    """The open streams, one to each gateway."""

    def __init__(self) -> None:
        self._open: dict[str, ResponseStream] = {}

    @contextmanager
    def opened(self, gateway: str) -> Iterator[ResponseStream]:
        """Open a gateway's stream; an older one of the same gateway is broken and closed."""
        if gateway in self._open:
            self._open[gateway].close()
        stream = self._open[gateway] = ResponseStream()
        try:
            yield stream
        finally:
            stream.close()
            if self._open.get(gateway) is stream:
                del self._open[gateway]

    async def to(self, gateway: str) -> ResponseStream:
        """Return a gateway's stream, waiting for a new gateway to open it. Raises EngineClosed."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + _OPENING_S
        while gateway not in self._open:
            if loop.time() >= due_s:
                raise EngineClosed("the gateway does not listen: send the request again")
            await asyncio.sleep(0.01)
        return self._open[gateway]


def _gateway_gone() -> EngineClosed:
    return EngineClosed("the gateway hears this replica no more: send the request again")


def _cut(item: bytes) -> list[bytes]:
    return [item[at : at + _MESSAGE_BYTES] for at in range(0, len(item), _MESSAGE_BYTES)]


def joined(items: list[StreamItem]) -> list[StreamItem]:
    """Return the items with consecutive bytes joined."""
    if len(items) < 2:
        return items
    made = list[StreamItem]()
    for _, run in groupby(items, lambda item: isinstance(item, bytes)):
        alike = list(run)
        made += [b"".join(alike)] if isinstance(alike[0], bytes) else alike  # type: ignore[arg-type]
    return made


class ResponseBuffer:
    """The items of one call's answer that have come. Lives on one event loop.

    Between here and a client nothing holds a delta back, so deltas that come too often for this
    gateway would queue up where they cannot be joined. They are joined here instead: `interval_s`
    says how long after a delta was taken the next one is ready. The first and the last never wait.
    received: how many items have come, and ended: whether all have, taken or not. replica: the one
    that answers, once it has.
    """

    def __init__(self, interval_s: Callable[[], float]) -> None:
        self._items: list[StreamItem] = []
        self._ready = asyncio.Event()
        self._interval_s = interval_s
        self._taken_s = -math.inf
        self._waking: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        self.received = 0
        self.ended = False
        self.replica: str | None = None

    def put(self, items: Sequence[StreamItem], *, ended: bool) -> None:
        """Add new items, and wake the taker when it is time."""
        self._items += items
        self.received += len(items)
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
        due_s = self._taken_s + self._interval_s()
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
        buffer = self._open[request_id] = ResponseBuffer(self._interval_s)
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

    def fail(self, replica: str, error: BaseException) -> None:
        """Fail the answers of this replica that have begun and not ended."""
        for buffer in self._open.values():
            if buffer.replica == replica:
                buffer.fail(error)

    def awaits(self, replica: str) -> bool:
        """Whether an answer of this replica has begun and not ended."""
        return any(buffer.replica == replica for buffer in self._open.values())

    def _interval_s(self) -> float:
        """Return how far apart deltas of one stream must be for this gateway to pass on all."""
        return len(self._open) / DELTAS_PER_S
