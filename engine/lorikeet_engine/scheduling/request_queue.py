"""Requests that callers have sent and the engine has not taken in, and all that are not over."""

import threading

from lorikeet_engine.errors import EngineClosed, InvalidRequest
from lorikeet_engine.scheduling.sequence import Sequence

Abort = tuple[str, int | None]
"""A request's id, and which of its choices; None for all."""


class RequestQueue:
    """Between the threads that call an engine and the one that steps it. Any may use it.

    open: request id → choices that have not ended.
    """

    def __init__(self) -> None:
        self.open: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._submitted: list[Sequence] = []
        self._aborted: list[Abort] = []

    @property
    def submitted(self) -> list[Sequence]:
        """The choices that were not taken in yet."""
        return list(self._submitted)

    def submit(self, request_id: str, sequences: list[Sequence]) -> None:
        """Put a request's choices in. Raises EngineClosed, and InvalidRequest if it is open."""
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed: send the request to another replica")
            if request_id in self.open:
                raise InvalidRequest(
                    f"request_id={request_id!r} is in flight: want a new one", param="request_id"
                )
            self.open[request_id] = len(sequences)
            # an abort that came too late was for the last request of this id
            self._aborted = [abort for abort in self._aborted if abort[0] != request_id]
            self._submitted += sequences

    def abort(self, request_id: str, choice: int | None) -> None:
        """Have it aborted; what has ended is left alone."""
        with self._lock:
            if request_id in self.open:
                self._aborted.append((request_id, choice))

    def take(self) -> tuple[list[Sequence], set[Abort]]:
        """What has come since the last time: choices, and what is to be aborted after that."""
        with self._lock:
            submitted, self._submitted = self._submitted, []
            aborted, self._aborted = self._aborted, []
        return submitted, set(aborted)

    def ended(self, request_id: str) -> None:
        """One of its choices has ended."""
        with self._lock:
            self.open[request_id] -= 1
            if self.open[request_id] == 0:
                del self.open[request_id]

    def failed(self, request_id: str) -> None:
        """All of it has ended."""
        with self._lock:
            self.open.pop(request_id, None)

    def clear(self) -> list[str]:
        """All requests have ended. Returns their ids."""
        with self._lock:
            ids = list(self.open)
            self.open.clear()
            self._submitted.clear()
        return ids

    def close(self) -> bool:
        """Take nothing more in; whether that is new."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        return not was_closed
