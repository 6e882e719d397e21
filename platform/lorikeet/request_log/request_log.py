"""Request log: each gateway keeps its own requests in memory and can ask all others."""

import asyncio
import heapq
import re
import time
from collections.abc import Callable
from itertools import chain

from lorikeet.errors import NotFound, Unavailable
from lorikeet.protocol.peers import Peers
from lorikeet.request_log.ended_requests import RECENT, EndedRequests
from lorikeet.request_log.record import RequestRecord, RequestTrace
from lorikeet.request_log.why import Json, explain

KEPT_S = 3600.0
KEPT_BYTES = 64 * 2**20
"""Limit on the bytes of kept records.

At some 300 bytes a request, the limit suffices for an hour of 60 requests a second.
"""
_QUESTION, _RECENT = "explain", "recent"
Subscriber = Callable[[RequestRecord], None]
_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)?([0-9a-f]{32})(?:-[0-9])?")


class RequestLog:
    """Running and recently ended requests of one gateway. For one event loop.

    An ended request is kept for an hour, or until newer requests need its memory.

    peers: asks the other gateways about requests, and answers theirs.
    kept_bytes: limit on the bytes of ended requests' records.
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
        peers.register(_RECENT, self._own_recent)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with the record of each ended request."""
        self._subscribers.append(subscriber)

    def trace(
        self,
        request_id: str,
        path: str = "",
        traceparent: str | None = None,
        method: str = "POST",
    ) -> RequestTrace:
        """Begin the trace of a request that has just arrived.

        path, method: path of the route and method of the HTTP request.
        traceparent: W3C header that names the caller's own trace; None without one.
        """
        return RequestTrace(request_id, self._begin, self._end, path, traceparent, method)

    @property
    def open(self) -> int:
        """Number of requests of this gateway that are running."""
        return len(self._running)

    @property
    def ended_bytes(self) -> int:
        """Bytes of ended requests' records."""
        return self._ended.held_bytes

    async def find(self, asked_id: str, tenant: str | None = None) -> Json:
        """Return the explanation (`explain`: times and facts as JSON) of a request of any gateway.

        Raises NotFound for an unknown request and, indistinguishably, for another tenant's. Raises
        Unavailable if not all gateways answer.

        asked_id: x-request-id or the answer's own id.
        tenant: owner of the request; None for an admin, who may see all.
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

    async def recent(self, tenant: str) -> Json:
        """Return the explanations (`explain`) of a tenant's requests of all gateways: `data` has
        the running and the last ended ones, the newest first, RECENT at most.

        `silent` is the number of gateways that did not answer, None if none could be asked.
        """
        answers, silent = await self._peers.ask(_RECENT, tenant)
        found = sorted(chain(*answers), key=lambda each: each["received"], reverse=True)
        return {"data": found[:RECENT], "silent": silent}

    def running(self) -> list[RequestRecord]:
        """Return the current records of running requests."""
        return [trace.record() for trace in self._running.values()]

    async def _answer(self, request_id: str, tenant: str | None) -> Json | None:
        record = self._record(request_id)
        if record is None or tenant not in (None, record.tenant):
            return None
        return explain(record, for_admin=tenant is None)

    async def _own_recent(self, tenant: str) -> list[Json]:
        ended = self._ended.recent(tenant, self._clock() - KEPT_S)
        running = [record for record in self.running() if record.tenant == tenant]
        newest = heapq.nlargest(RECENT, running, key=lambda record: record.received)

        def explained() -> list[Json]:
            return [explain(record, for_admin=False) for record in (*newest, *ended())]

        return await asyncio.to_thread(explained)

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
        if record.tenant is not None:  # without a tenant nobody could ask for it
            record.traceparent = None  # its length is the caller's choice
            now_s = self._clock()
            self._ended.keep(record, now_s)
            self._ended.forget(now_s - KEPT_S)
