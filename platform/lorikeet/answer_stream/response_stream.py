"""The replica's end of answers: what is new for each gateway, sent as one message.

A step of the engine adds a delta to every answer. One call of Ray Serve for each delta costs a
replica's event loop 70 us, more than all the rest; hence one message for all of them.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from lorikeet.protocol.messages import StreamItem
from lorikeet_engine.errors import EngineClosed

DeltaGroup = tuple[str, list[StreamItem], bool]
"""A request's id, the new items of its answer, and whether it has ended. Tuples pickle fast."""

_MESSAGE_BYTES = 2**20  # about; a message of more than 16 MiB would not pass
_OPENING_S = 5.0


class ResponseStream:
    """The new items of all answers to one gateway. Lives on one event loop.

    `closed` is done once the gateway takes no more.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[StreamItem]] = {}
        self._ended: set[str] = set()
        self._ready = asyncio.Event()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, request_id: str, items: Sequence[StreamItem], *, ended: bool = False) -> None:
        """Add new items of an answer."""
        self._waiting.setdefault(request_id, []).extend(items)
        if ended:
            self._ended.add(request_id)
        self._ready.set()

    async def take(self) -> list[DeltaGroup]:
        """Return all new items, at least one group as long as the stream is open."""
        await self._ready.wait()
        groups, size = list[DeltaGroup](), 0
        while self._waiting and size < _MESSAGE_BYTES:
            request_id = next(iter(self._waiting))
            items = self._waiting.pop(request_id)
            groups.append((request_id, joined(items), request_id in self._ended))
            self._ended.discard(request_id)
            size += sum(len(item) for item in items if isinstance(item, bytes))
        if not self._waiting:
            self._ready.clear()
        return groups

    def close(self) -> None:
        """Wake `take` and all who wait for `closed`."""
        if not self.closed.done():
            self.closed.set_result(None)
        self._ready.set()

    async def wait_for(self, ended: asyncio.Future[None]) -> None:
        """Wait until an answer has ended. Raises EngineClosed if it cannot reach its gateway."""
        await asyncio.wait((ended, self.closed), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            raise EngineClosed("the gateway hears this replica no more: send the request again")
        ended.result()


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
        try:
            async with asyncio.timeout(_OPENING_S):
                while gateway not in self._open:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise EngineClosed("the gateway does not listen: send the request again") from None
        return self._open[gateway]


def joined(items: list[StreamItem]) -> list[StreamItem]:
    """Return the items with consecutive bytes joined."""
    if len(items) < 2:
        return items
    made = list[StreamItem]()
    for _, run in groupby(items, lambda item: isinstance(item, bytes)):
        alike = list(run)
        made += [b"".join(alike)] if isinstance(alike[0], bytes) else alike  # type: ignore[arg-type]
    return made
