"""How long requests may wait: for their turn, and for their adapter."""

import threading
import time
import weakref
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.errors import AdapterNotReady, EngineError, EngineOverloaded
from lorikeet_engine.request import Request, Terms
from lorikeet_engine.scheduling.sequence import Sequence

# A wait that is expected to be so many times too long is refused at once: expectations err.
_FAR = 2.0
_SOONEST_S = 1.0  # nobody is told to come back sooner

_WaitsFor = Callable[[Request], EngineError | None]
"""Why a request fails now, unless what it waited for is there."""


class _Deadline(NamedTuple):
    """choices: a request's; weak, for most requests are over by then."""

    at_s: float
    number: int
    waits_for: _WaitsFor
    choices: "list[weakref.ref[Sequence]]"

    def missed(self) -> Request | None:
        """The request, if none of its choices has begun, or ended."""
        request = None
        for choice in self.choices:
            sequence = choice()
            if sequence is None or sequence.ended or sequence.progress.begun_s is not None:
                return None
            request = sequence.request
        return request


class Deadlines:
    """Those of the requests that have not begun. May be used from any thread."""

    def __init__(
        self, wait_s: Callable[[Terms], float], load_s: Callable[[AdapterRef], float]
    ) -> None:
        """wait_s: how long a request on such terms would wait for its turn if it came now.

        load_s: how long it takes until an adapter is on the GPU; 0 once it is.
        """
        self._wait_s, self._load_s = wait_s, load_s
        self._lock = threading.Lock()
        self._deadlines: list[_Deadline] = []  # a heap
        self._numbers = count()

    def check(self, terms: Terms) -> None:
        """Raise EngineOverloaded for a request that would wait much longer than it may."""
        if terms.max_queue_s is not None:
            wait_s = self._wait_s(terms)
            if wait_s > _FAR * terms.max_queue_s:
                raise _overloaded(terms, wait_s)

    def add(self, choices: list[Sequence]) -> None:
        """A request has come, of these choices."""
        request, arrived_s = choices[0].request, choices[0].progress.arrived_s
        terms, weak = request.terms, [weakref.ref(choice) for choice in choices]
        bounds: list[tuple[float | None, _WaitsFor]] = [(terms.max_queue_s, self._queued)]
        if request.adapter is not None:
            bounds.append((terms.max_load_s, self._loading))
        with self._lock:
            for bound_s, waits_for in bounds:
                if bound_s is not None:
                    at_s, number = arrived_s + bound_s, next(self._numbers)
                    heappush(self._deadlines, _Deadline(at_s, number, waits_for, weak))

    def within_s(self, timeout_s: float | None) -> float | None:
        """How long until the next deadline, timeout_s at most; None is for ever."""
        with self._lock:
            if not self._deadlines:
                return timeout_s
            left_s = max(0.0, self._deadlines[0].at_s - time.monotonic())
        return left_s if timeout_s is None else min(left_s, timeout_s)

    def missed(self) -> dict[str, EngineError]:
        """The requests that have waited too long since the last call, by id, and why they fail."""
        now_s, over = time.monotonic(), list[_Deadline]()
        with self._lock:
            while self._deadlines and self._deadlines[0].at_s <= now_s:
                over.append(heappop(self._deadlines))
        errors: dict[str, EngineError] = {}
        for deadline in over:
            request = deadline.missed()
            error = deadline.waits_for(request) if request is not None else None
            if request is not None and error is not None:
                errors[request.request_id] = error
        return errors

    def _queued(self, request: Request) -> EngineOverloaded:
        return _overloaded(request.terms, self._wait_s(request.terms))

    def _loading(self, request: Request) -> AdapterNotReady | None:
        assert request.adapter is not None
        load_s = self._load_s(request.adapter)
        if not load_s:
            return None
        return AdapterNotReady(
            f"adapter {request.adapter} is on its way to the GPU and has not come within "
            f"{request.terms.max_load_s:g} s: send the request again, or let it wait longer",
            retry_after_s=max(_SOONEST_S, load_s),
        )


def _overloaded(terms: Terms, wait_s: float) -> EngineOverloaded:
    assert terms.max_queue_s is not None
    retry_after_s = max(_SOONEST_S, wait_s - terms.max_queue_s)
    return EngineOverloaded(
        f"this replica cannot begin the request within the {terms.max_queue_s:g} s that it may "
        f"wait: send it again in {retry_after_s:.0f} s",
        retry_after_s=retry_after_s,
    )
