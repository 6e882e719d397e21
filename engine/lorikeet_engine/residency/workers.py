"""Background threads for work that waits: on a network, a disk, a long copy."""

import itertools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from enum import IntEnum

log = logging.getLogger(__name__)

_JOIN_S = 2.0


class _Priority(IntEnum):
    """The order of work: the least first."""

    CLOSE = 0
    URGENT = 1
    NORMAL = 2


class Workers:
    """A few daemon threads; urgent work goes first, and tenants take turns. Thread-safe.

    Work gets the round after its tenant's last one, or the round that is being worked on if that is
    later, so a tenant with hundreds of loads delays its own. Within a round the first come goes
    first.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.PriorityQueue[tuple[_Priority, int, int, Callable[[], None]]]
        self._queue = queue.PriorityQueue()
        self._order = itertools.count()
        self._lock = threading.Lock()  # guards the two below
        self._rounds = Counter[_Priority]()  # that are being worked on
        self._next_rounds: dict[tuple[_Priority, str], int] = {}  # of tenants that have work
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"lorikeet-{name}-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None], *, urgent: bool, tenant: str = "") -> None:
        """Run work on one of the threads, in a tenant's turn."""
        priority = _Priority.URGENT if urgent else _Priority.NORMAL
        with self._lock:
            if self._queue.empty():
                self._next_rounds.clear()
            at = max(self._rounds[priority], self._next_rounds.get((priority, tenant), 0))
            self._next_rounds[priority, tenant] = at + 1
            self._queue.put((priority, at, next(self._order), work))

    def close(self) -> None:
        """Start nothing more. What hangs in a source is left to end with the process."""
        self._closed = True
        for _ in self._threads:
            self._queue.put((_Priority.CLOSE, 0, next(self._order), lambda: None))
        for thread in self._threads:
            thread.join(_JOIN_S / len(self._threads))

    def _run(self) -> None:
        while True:
            priority, at, _, work = self._queue.get()
            with self._lock:
                self._rounds[priority] = max(self._rounds[priority], at)
            if self._closed:
                return
            try:
                work()
            except Exception:
                log.exception("background_work_failed")
