"""Deadlines by which a request must begin and its adapter must be on the GPU."""

import math
import threading
import time
import weakref
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from lorikeet_engine.adapter import Adapter
from lorikeet_engine.errors import AdapterNotReady, EngineError, EngineOverloaded
from lorikeet_engine.request import Request, SchedulingParams
from lorikeet_engine.scheduling.sequence import Sequence, SequenceStatus

# A request is refused at once if the estimated wait is this many times max_queue_s: estimates err.
_REFUSE_FACTOR = 2.0
_MIN_RETRY_AFTER_S = 1.0

_ErrorOf = Callable[[Request], EngineError | None]
"""Function that returns the error of a request that missed its deadline, or None if the deadline
was for loading the adapter and the adapter is on the GPU.
"""


class _Deadline(NamedTuple):
    """Time at which a request fails if none of its choices has begun.

    at_s: the time, by the monotonic clock.
    number: serial number, which orders deadlines of equal time.
    error_of: returns the error with which the request fails, or None if it need not fail.
    choices: the request's choices. Weak references.
    """

    at_s: float
    number: int
    error_of: _ErrorOf
    choices: "list[weakref.ref[Sequence]]"

    def missed_by(self) -> Request | None:
        """Return the request if all its choices still wait; None if the deadline was met.

        Call it when the deadline has passed.
        """
        request = None
        for choice in self.choices:
            sequence = choice()
            if sequence is None or sequence.status is not SequenceStatus.WAITING:
                return None
            request = sequence.request
        return request


class Deadlines:
    """Deadlines by which requests must begin. Methods may be called on any thread."""

    def __init__(
        self, wait_s: Callable[[SchedulingParams], float], load_s: Callable[[Adapter], float]
    ) -> None:
        """Start without deadlines.

        wait_s: estimates the seconds that a new request with these parameters would be queued.
        load_s: estimates the seconds until an adapter is on the GPU; 0 if it is there.
        """
        self._wait_s, self._load_s = wait_s, load_s
        self._lock = threading.Lock()
        self._deadlines: list[_Deadline] = []  # a heap
        self._numbers = count()

    def check(self, params: SchedulingParams) -> None:
        """Raise EngineOverloaded if a new request would wait more than twice its max_queue_s."""
        if params.max_queue_s is not None:
            wait_s = self._wait_s(params)
            if wait_s > _REFUSE_FACTOR * params.max_queue_s:
                raise _overloaded(params, wait_s)

    def add(self, choices: list[Sequence]) -> None:
        """Watch the deadlines of a new request: for its start (max_queue_s) and its adapter
        (max_load_s).

        choices: all choices of the request.
        """
        request, arrived_s = choices[0].request, choices[0].timings.arrived_s
        params, weak = request.scheduling, [weakref.ref(choice) for choice in choices]
        bounds: list[tuple[float | None, _ErrorOf]] = [(params.max_queue_s, self._queue_error)]
        if request.adapter is not None:
            bounds.append((params.max_load_s, self._load_error))
        with self._lock:
            for bound_s, error_of in bounds:
                if bound_s is not None:
                    at_s, number = arrived_s + bound_s, next(self._numbers)
                    heappush(self._deadlines, _Deadline(at_s, number, error_of, weak))

    def next_within_s(self, timeout_s: float | None) -> float | None:
        """Return the seconds until the next deadline, or timeout_s if that is less.

        timeout_s: None for no upper limit; then None is returned if there is no deadline.
        """
        with self._lock:
            if not self._deadlines:
                return timeout_s
            left_s = max(0.0, self._deadlines[0].at_s - time.monotonic())
        return left_s if timeout_s is None else min(left_s, timeout_s)

    def take_missed(self) -> dict[str, EngineError]:
        """Return, by request id, the errors of requests that missed a deadline since the last
        call.
        """
        now_s, passed = time.monotonic(), list[_Deadline]()
        with self._lock:
            while self._deadlines and self._deadlines[0].at_s <= now_s:
                passed.append(heappop(self._deadlines))
        errors: dict[str, EngineError] = {}
        for deadline in passed:
            request = deadline.missed_by()
            error = deadline.error_of(request) if request is not None else None
            if request is not None and error is not None:
                errors[request.request_id] = error
        return errors

    def _queue_error(self, request: Request) -> EngineError:
        params = request.scheduling
        not_ready = self._not_ready(request, params.max_queue_s) if request.adapter else None
        return not_ready or _overloaded(params, self._wait_s(params))

    def _load_error(self, request: Request) -> AdapterNotReady | None:
        return self._not_ready(request, request.scheduling.max_load_s)

    def _not_ready(self, request: Request, waited_s: float | None) -> AdapterNotReady | None:
        """Return the error of a request whose adapter is not on the GPU; None if it is there.

        waited_s: seconds that the request has waited, for the message; must not be None.
        """
        assert request.adapter is not None
        assert waited_s is not None
        load_s = self._load_s(request.adapter)
        if not load_s:
            return None
        return AdapterNotReady(
            f"adapter {request.adapter} is on its way to the GPU and has not come within "
            f"{waited_s:g} s: send the request again, or let it wait longer",
            retry_after_s=max(_MIN_RETRY_AFTER_S, load_s),
        )


def _overloaded(params: SchedulingParams, wait_s: float) -> EngineOverloaded:
    assert params.max_queue_s is not None
    # After max_queue_s, every request queued now with the same bound has begun or failed.
    wait_s = min(wait_s - params.max_queue_s, params.max_queue_s)
    retry_after_s = max(_MIN_RETRY_AFTER_S, wait_s)
    return EngineOverloaded(
        f"this replica cannot begin the request within the {params.max_queue_s:g} s that it may "
        f"wait: send it again in {math.ceil(retry_after_s)} s",
        retry_after_s=retry_after_s,
    )
