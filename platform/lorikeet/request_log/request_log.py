"""The log of a service's requests: each gateway keeps its own in memory, and any can be asked."""

import re
import time
from collections.abc import Callable

from lorikeet.errors import NotFound, Unavailable
from lorikeet.protocol.peers import Peers
from lorikeet.request_log.ended_requests import EndedRequests
from lorikeet.request_log.record import RequestRecord, RequestTrace
from lorikeet.request_log.why import Json, explain

KEPT_S = 3600.0
KEPT_BYTES = 64 * 2**20
"""Some 300 bytes a request: an hour of 60 requests a second."""
_QUESTION = "explain"
Subscriber = Callable[[RequestRecord], None]
_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)?([0-9a-f]{32})(?:-[0-9])?")


class RequestLog:
    """The requests of one gateway: those that run, and the last that ended. For one event loop.

    An ended one is kept for an hour, or until newer ones need its room.
    """

    def __init__(
        self,
        peers: Peers,
        kept_bytes: int = KEPT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers, self._clock = peers, clock
        self._subscribers: list[Subscriber] = []
        self._running: dict[str, RequestTrace] = {}
        self._ended = EndedRequests(kept_bytes)
        peers.register(_QUESTION, self._answer)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with the record of each request that is over."""
        self._subscribers.append(subscriber)

    def trace(
        self,
        request_id: str,
        path: str = "",
        traceparent: str | None = None,
        method: str = "POST",
    ) -> RequestTrace:
        """Begin the trace of a request that has just come. path: the route's."""
        return RequestTrace(request_id, self._begin, self._end, path, traceparent, method)

    @property
    def open(self) -> int:
        """How many requests run."""
        return len(self._running)

    @property
    def ended_bytes(self) -> int:
        """What it keeps of requests that ended."""
        return self._ended.held_bytes

    async def find(self, asked_id: str, tenant: str | None = None) -> Json:
        """Return any gateway's explanation of a request; tenant: only if it is this one's.

        asked_id: x-request-id or the answer's own id. Raises NotFound, alike for an unknown
        request and for another tenant's, and Unavailable where not all gateways answer.
        """
        match = _ID.fullmatch(asked_id)
        if match is not None:
            own = await self._answer(match[1], tenant)
            if own is not None:
                return own
            answers, silent = await self._peers.poll(_QUESTION, match[1], tenant)
            for answer in answers:
                if answer is not None:
                    found: Json = answer
                    return found
            if silent:
                raise Unavailable(f"{silent} gateways did not answer: ask again")
        raise NotFound(
            "no such request is known: it may have ended more than an hour ago, before its gateway "
            "was started, or before more requests than a gateway keeps",
            param="request_id",
        )

    def running(self) -> list[RequestRecord]:
        """Return the records of requests that run, as they are now."""
        return [trace.record() for trace in self._running.values()]

    async def _answer(self, request_id: str, tenant: str | None) -> Json | None:
        record = self._record(request_id)
        if record is None or tenant not in (None, record.tenant):
            return None
        return explain(record, for_admin=tenant is None)

    def _record(self, request_id: str) -> RequestRecord | None:
        trace = self._running.get(request_id)
        if trace is not None:
            return trace.record()
        return self._ended.find(request_id, self._clock() - KEPT_S)

    def _begin(self, trace: RequestTrace) -> None:
        self._running[trace.request_id] = trace

    def _end(self, record: RequestRecord) -> None:
        self._running.pop(record.request_id, None)
        for subscriber in self._subscribers:
            subscriber(record)
        if record.tenant is not None:  # no tenant could ask about the others
            record.traceparent = None  # which is as long as its caller likes
            now_s = self._clock()
            self._ended.keep(record, now_s)
            self._ended.forget(now_s - KEPT_S)
