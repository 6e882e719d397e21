"""Requests on their way from callers to the engine, and which requests are still open."""

import threading
from typing import NamedTuple

from lorikeet_engine.errors import EngineClosed, InvalidRequest
from lorikeet_engine.scheduling.sequence import Sequence


class Abort(NamedTuple):
    """A request, and the choice of it to abort; None for all its choices."""

    request_id: str
    choice: int | None


class TakenRequests(NamedTuple):
    """What the engine takes from the queue: new choices, and what to abort once they are added."""

    submitted: list[Sequence]
    aborts: set[Abort]

    def is_aborted(self, sequence: Sequence) -> bool:
        """Whether a sequence is to be aborted."""
        request_id = sequence.request.request_id
        return (request_id, None) in self.aborts or (request_id, sequence.choice) in self.aborts


class RequestQueue:
    """Hands requests from the threads that call an engine to the one that steps it. Thread-safe.

    open_choices: request id → how many of its choices have not ended.
    """

    def __init__(self) -> None:
        self.open_choices: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._submitted: list[Sequence] = []
        self._aborts: list[Abort] = []

    @property
    def submitted(self) -> list[Sequence]:
        """The choices that the engine has not taken yet."""
        return list(self._submitted)

    def submit(self, request_id: str, sequences: list[Sequence]) -> None:
        """Add a request's choices. Raises EngineClosed, and InvalidRequest if its id is open."""
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed: send the request to another replica")
            if request_id in self.open_choices:
                raise InvalidRequest(
                    f"request_id={request_id!r} is in flight: want a new one", param="request_id"
                )
            self.open_choices[request_id] = len(sequences)
            # an abort that came too late was for the last request of this id
            self._aborts = [abort for abort in self._aborts if abort.request_id != request_id]
            self._submitted += sequences

    def abort(self, request_id: str, choice: int | None) -> None:
        """Ask for a request to be aborted; nothing happens if it has ended."""
        with self._lock:
            if request_id in self.open_choices:
                self._aborts.append(Abort(request_id, choice))

    def take(self) -> TakenRequests:
        """The choices submitted and the aborts asked for since the last call."""
        with self._lock:
            submitted, self._submitted = self._submitted, []
            aborts, self._aborts = self._aborts, []
        return TakenRequests(submitted, set(aborts))

    def choice_ended(self, request_id: str) -> None:
        """Note that one choice of a request has ended."""
        with self._lock:
            self.open_choices[request_id] -= 1
            if self.open_choices[request_id] == 0:
                del self.open_choices[request_id]

    def request_failed(self, request_id: str) -> None:
        """Note that all choices of a request have ended."""
        with self._lock:
            self.open_choices.pop(request_id, None)

    def clear(self) -> list[str]:
        """Note that all requests have ended; returns their ids."""
        with self._lock:
            ids = list(self.open_choices)
            self.open_choices.clear()
            self._submitted.clear()
        return ids

    def close(self) -> bool:
        """Accept no more requests; returns False if it was closed before."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        return not was_closed
