"""Stream of answers from a replica to a gateway: both ends.

The path of an answer, from the engine's tokens to the client's bytes at a gateway:

    replica                                                     gateway
    ───────                                                     ───────
    the engine's outputs, one message a step
       │
    AnswerSender        one a call                              ReplicaResponse ──► the client
       │                                                           ▲ bytes, unread
    Answer              all choices, until the last ends           │
       ├ ChoiceStream   one a choice:                           ResponseBuffer     one a call
       │   Detokenizer    ids → text, stop strings                 ▲ joins deltas that come faster
       │   reasoning      text → thinking and answer               │ than the gateway sends them
       │   tools/         text → tool calls                        │
       │   logprobs       tokens → log probabilities               │
       ├ PromptLogprobsJson   one a prompt, where                  │
       │                  prompt logprobs are asked for            │
       └ apis/…/answer.py   JSON or SSE of the called API       ResponseBuffers
       │                                                           ▲ delivers by request id
       ▼            one message: a DeltaGroup of each answer       │
    ResponseStream ════════════════════════════════════════════════╛
     one a gateway      kept open by serving/replica_calls.py

`Replica.run_call` returns no part of the answer, only which replica has taken the call and that the
call has ended. A step of the engine adds a delta to every answer. One Ray Serve call for each delta
would cost more than all other work on the delta, so all deltas for one gateway travel in one
message.

An answer's items are an AnswerHeader, a second AnswerHeader before the first bytes, bytes, now and
then a RunningUsage, and a FinalUsage before the last bytes. In an answer that fails, a Refusal
replaces the remaining items. The last DeltaGroup of an answer is marked as its end. That mark may
come long after the call's end. The answer is lost only if the call has ended, and its stream ends
before the mark has come: another replica then continues the answer. A stream begins with an empty
message, which shows that the gateway's older stream from the replica has ended.

With the items of a DeltaGroup comes the log of the engine's outputs that they were made of. The
gateway keeps the log unread. If the replica is lost, another replica gets the log, converts the
same outputs again and drops the items, which the client has: the next items follow without a gap.
The log keeps outputs apart, since an answer's events depend on where each output ends.
"""

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from lorikeet.protocol.messages import StreamItem
from lorikeet_engine.errors import EngineClosed
from lorikeet_engine.request import EngineTimings, FinishReason, TokenLogprobs, Tokens

DeltaGroup = tuple[str, list[StreamItem], bytes | None, bool]
"""New items of one answer: the attempt's id, the items, the log of the outputs that they were made
of (`logged`), and True at the answer's end.

The log is None in all messages but the last of items that need several messages. A tuple, because
tuples pickle fast.
"""

_MESSAGE_BYTES = 2**18
"""Approximate limit on the bytes of one message; longer items are sent in parts.

A message above RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH makes gRPC end the stream, which fails all
answers in flight to that gateway.
"""
_OPENING_S = 5.0
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)
DELTAS_PER_S = 5_000
"""Number of deltas a second that one gateway can forward, almost regardless of their size.

Measured by `make bench-gateway`: a delta takes 0.12 ms of CPU from replica to client behind
HAProxy, 0.26 ms behind Serve's own proxy.
"""


class _Unsent:
    """Items of one answer that no message has carried yet, their log, and whether they end it."""

    __slots__ = ("ended", "items", "log")

    def __init__(self) -> None:
        self.items: list[StreamItem] = []
        self.log, self.ended = b"", False


class ResponseStream:
    """Queue of unsent items of all answers from a replica to one gateway. For one event loop.

    An item is a piece of an answer: bytes for the client, or an object for the gateway, such as
    token counts.

    closed: True once the gateway no longer reads the stream.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Unsent] = {}
        self._ready = asyncio.Event()
        self._unfinished = set[asyncio.Future[None]]()
        self.closed = False

    def put(
        self, request_id: str, items: Sequence[StreamItem], log: bytes = b"", *, ended: bool = False
    ) -> None:
        """Add new items of an answer, split into parts that fit a message.

        request_id: id of the attempt to answer the call.
        log: record of the engine's outputs that the items were made of (`logged`).
        ended: True if these are the answer's last items.
        """
        unsent = self._waiting.get(request_id)
        if unsent is None:
            unsent = self._waiting[request_id] = _Unsent()
        for item in items:
            if isinstance(item, bytes) and len(item) > _MESSAGE_BYTES:
                unsent.items += _cut(item)
            else:
                unsent.items.append(item)
        unsent.log += log
        unsent.ended |= ended
        self._ready.set()

    async def take(self) -> list[DeltaGroup]:
        """Wait for new items; return those that fit a message, by answer.

        Returns an empty list once the stream is closed and has no more items.
        """
        await self._ready.wait()
        groups, size = list[DeltaGroup](), 0
        while self._waiting and size < _MESSAGE_BYTES:
            request_id = next(iter(self._waiting))
            unsent, count = self._waiting.pop(request_id), 0
            items = unsent.items
            while count < len(items) and size < _MESSAGE_BYTES:
                item = items[count]
                size += len(item) if isinstance(item, bytes) else 0
                count += 1
            if count == len(items):
                groups.append((request_id, joined(items), unsent.log, unsent.ended))
                continue
            groups.append((request_id, joined(items[:count]), None, False))
            unsent.items = items[count:]
            self._waiting[request_id] = unsent  # after the other answers, which it must not delay
        if not self._waiting:
            self._ready.clear()
        return groups

    def close(self) -> None:
        """Close the stream: wake `take` and fail unfinished answers."""
        self.closed = True
        self._ready.set()
        for ended in self._unfinished:
            if not ended.done():
                ended.set_exception(_gateway_gone())

    async def wait_for(self, ended: asyncio.Future[None]) -> None:
        """Wait until an answer is complete. Raises EngineClosed if the gateway is gone.

        ended: future that is done at the answer's end.
        """
        if self.closed and not ended.done():
            raise _gateway_gone()
        self._unfinished.add(ended)
        try:
            await ended
        finally:
            self._unfinished.remove(ended)


class ResponseStreams:
    """A replica's open ResponseStreams, one to each gateway that reads its answers."""

    def __init__(self) -> None:
        self._open: dict[str, ResponseStream] = {}

    @contextmanager
    def opened(self, gateway: str) -> Iterator[ResponseStream]:
        """Open a gateway's stream until the context ends; close an older stream of the gateway."""
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
        """Return the stream to a gateway; wait for a new gateway to open it.

        Raises EngineClosed if the gateway does not open it within 5 s.
        """
        loop = asyncio.get_running_loop()
        due_s = loop.time() + _OPENING_S
        while gateway not in self._open:
            if loop.time() >= due_s:
                raise EngineClosed("the gateway has not opened its stream: send the request again")
            await asyncio.sleep(0.01)
        return self._open[gateway]


def _gateway_gone() -> EngineClosed:
    return EngineClosed("the gateway's stream from this replica has ended: send the request again")


def _cut(item: bytes) -> list[bytes]:
    return [item[at : at + _MESSAGE_BYTES] for at in range(0, len(item), _MESSAGE_BYTES)]


def joined(items: list[StreamItem]) -> list[StreamItem]:
    """Return the items with consecutive bytes concatenated."""
    if len(items) < 2:
        return items
    made = list[StreamItem]()
    for _, run in groupby(items, lambda item: isinstance(item, bytes)):
        alike = list(run)
        made += [b"".join(alike)] if isinstance(alike[0], bytes) else alike  # type: ignore[arg-type]
    return made


class ResponseBuffer:
    """Received items of one call's answer at a gateway. For one event loop.

    Joins deltas that come faster than the gateway can send them. The next delta is ready
    `interval_s` after the previous one was taken. The first and the last delta never wait. Items
    that come in several messages are taken once all have come, so that the log always covers
    exactly the items taken.

    received: number of items received.
    ended: True once all items were received, whether taken or not.
    replica: the replica that answers; None before its first item.
    is_cut: whether the stream that carries the answer has ended; before the first item, whether any
        replica's stream has begun or ended, as it may be the one.

    Constructor arguments:
    interval_s: function that returns the minimum time between two deltas, in seconds.
    log: record of the engine's outputs, from which another replica can go on with the answer; grows
        with the items.
    begun: whether the client has bytes of the answer.
    is_last: whether no other replica gets the call if the present one is lost.
    """

    def __init__(
        self,
        interval_s: Callable[[], float],
        log: bytearray,
        *,
        begun: bool = False,
        is_last: bool = False,
    ) -> None:
        self._items: list[StreamItem] = []
        self._log = log
        self._parts: list[StreamItem] = []  # of items that have not all come
        self._ready, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._interval_s = interval_s
        self._taken_s = -math.inf
        self._waking: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        self.received = 0
        self.ended = self.is_cut = False
        self.replica: str | None = None
        self._lost: BaseException | None = None
        self._begun, self._is_last = begun, is_last

    @property
    def can_move(self) -> bool:
        """Whether another replica can go on with the answer, or begin it anew.

        True while the client has no bytes of it; later, only with a log and if a further replica
        may get the call. False once the answer is complete.
        """
        if self.ended:
            return False
        return not self._begun or (bool(self._log) and not self._is_last)

    def put(
        self, items: Sequence[StreamItem], log: bytes | None = b"", *, ended: bool = False
    ) -> None:
        """Add new items of the answer; wake `take` once the interval between deltas has passed.

        log: record of the engine's outputs that the items were made of; None: further parts of the
            items follow.
        ended: True if these are the answer's last items.
        """
        self._parts += items
        self.received += len(items)
        if log is None:
            return
        self._items += self._parts
        self._begun = self._begun or any(isinstance(item, bytes) for item in self._parts)
        self._parts = []
        self._log += log
        self.ended = self.ended or ended
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the answer with an error, unless all its items were received."""
        if not self.ended:
            self._error = error
            self._wake()

    def end_call(self, lost: BaseException) -> None:
        """Record that the call has ended, so that only the replica's stream has what is missing.

        lost: error that ends the answer if that stream has ended, or ends before the answer does.
        """
        self._lost = lost
        if self.is_cut and self.received:
            self.fail(lost)

    def cut(self) -> None:
        """Record that the stream that carries the answer has ended, or may have if no item came."""
        self.is_cut = True
        if self._lost is not None and self.received:
            self.fail(self._lost)

    async def take(self) -> list[StreamItem]:
        """Wait for new items and return them; an empty list at the end of the answer.

        Raises the error given to `fail`.
        """
        await self._ready.wait()
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        items, self._items = self._items, []
        if items:
            if isinstance(items[-1], bytes):
                self._taken_s = self._loop.time()
            if not self.ended and self._error is None:
                self._ready.clear()
        elif not self.ended:
            assert self._error is not None
            raise self._error
        return joined(items)

    def _wake(self) -> None:
        due_s = self._taken_s + self._interval_s()
        if self.ended or self._error is not None or due_s <= self._loop.time():
            self._ready.set()
        elif self._waking is None:
            self._waking = self._loop.call_at(due_s, self._ready.set)


class ResponseBuffers:
    """A gateway's ResponseBuffers, one for each open call, found by request id."""

    def __init__(self) -> None:
        self._open: dict[str, ResponseBuffer] = {}

    @contextmanager
    def opened(
        self, request_id: str, log: bytearray, *, begun: bool = False, is_last: bool = False
    ) -> Iterator[ResponseBuffer]:
        """Yield a buffer that receives a call's answer until the context ends.

        request_id: id of the attempt to answer the call.
        log: the engine outputs from which the received items were made are appended to it.
        begun: whether the client has received a part of the answer.
        is_last: True if no other replica answers the call when the present one is lost.
        """
        buffer = ResponseBuffer(self._interval_s, log, begun=begun, is_last=is_last)
        self._open[request_id] = buffer
        try:
            yield buffer
        finally:
            del self._open[request_id]

    def deliver(self, replica: str, groups: Sequence[DeltaGroup]) -> None:
        """Put a replica's items into the buffers of their calls; drop items of closed calls."""
        if not groups:
            self.cut(replica)
        for request_id, items, log, ended in groups:
            buffer = self._open.get(request_id)
            if buffer is not None:
                if buffer.replica is None:
                    buffer.replica, buffer.is_cut = replica, False  # this stream has not ended
                buffer.put(items, log, ended=ended)

    def cut(self, replica: str) -> None:
        """Record that a replica's stream has ended, or that another has taken its place."""
        for buffer in self._open.values():
            if buffer.replica in (None, replica):
                buffer.cut()

    def fail(self, replica: str, error: BaseException) -> None:
        """Fail all answers that a replica has begun and not completed.

        error: raised to the answers' readers, by `take` of their buffers.
        """
        for buffer in self._open.values():
            if buffer.replica == replica:
                buffer.fail(error)

    def leave(self, replica: str, error: BaseException) -> int:
        """Fail all answers that a replica has begun and another replica can go on with (can_move).

        Returns their number.

        error: raised by the buffers' `take`.
        """
        begun = [each for each, buffer in self._open.items() if buffer.replica == replica]
        return self.leave_calls(begun, error)

    def leave_calls(self, request_ids: Iterable[str], error: BaseException) -> int:
        """Fail the open answers of these calls that another replica can go on with (can_move).

        Returns their number. Calls that are closed are ignored.

        error: raised by the buffers' `take`.
        """
        found = [self._open[each] for each in request_ids if each in self._open]
        moving = [buffer for buffer in found if buffer.can_move]
        for buffer in moving:
            buffer.fail(error)
        return len(moving)

    def awaited(self) -> set[str]:
        """Return the replicas that are answering open calls."""
        return {buffer.replica for buffer in self._open.values() if buffer.replica is not None}

    def _interval_s(self) -> float:
        """Return the shortest interval in seconds between an answer's deltas that this gateway can
        sustain.
        """
        return len(self._open) / DELTAS_PER_S


def logged(output: Tokens) -> bytes:
    """Return a record of one output of the engine: a line of JSON of about 25 bytes.

    The records of an answer's outputs are its log, from which another replica goes on with the
    answer if this one is lost.
    """
    if output.finish is None and output.timings is None and not output.logprobs:
        ids = ",".join(map(str, output.token_ids))  # most outputs: in a third of the time
        return f"[{output.choice},[{ids}],null,null,[]]\n".encode()
    finish = None if output.finish is None else output.finish.value
    cached = None if output.timings is None else output.timings.cached_tokens
    logprobs = [(each.logprob, each.top) for each in output.logprobs]
    record = (output.choice, output.token_ids, finish, cached, logprobs)
    return _ENCODER.encode(record).encode() + b"\n"


def outputs_of(log: bytes | bytearray, request_id: str) -> Iterator[Tokens]:
    """Yield the engine's outputs that are recorded in a log, the lines that `logged` made.

    Of an output's timings, only the number of cached tokens is recorded.

    request_id: id that the outputs get, since the log has none.
    """
    for line in log.splitlines():
        choice, token_ids, finish, cached, logprobs = json.loads(line)
        yield Tokens(
            request_id,
            choice,
            tuple(token_ids),
            None if finish is None else FinishReason(finish),
            tuple(TokenLogprobs(value, tuple(map(tuple, top))) for value, top in logprobs),
            None if cached is None else EngineTimings(cached_tokens=cached),
        )


def tokens_in(log: bytes | bytearray) -> int:
    """Return the number of tokens of the outputs in a log, the lines that `logged` made."""
    return sum(len(output.token_ids) for output in outputs_of(log, ""))
