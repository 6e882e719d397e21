"""Background threads for work that waits for a network, a disk or a long copy."""

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
    """Order in which work is begun: the smallest value first."""

    CLOSE = 0
    URGENT = 1
    NORMAL = 2


class Workers:
    """A few daemon threads that do urgent work first, and share time fairly between tenants.

    Fairness uses rounds. New work joins the round after its tenant's last work, or the current
    round if the current round is later. A tenant with hundreds of loads thus delays only its own
    work. Within a round, work is done in the order of arrival. Thread-safe.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.PriorityQueue[tuple[_Priority, int, int, Callable[[], None]]]
        self._queue = queue.PriorityQueue()
        self._order = itertools.count()
        self._lock = threading.Lock()  # guards _rounds and _next_rounds
        self._rounds = Counter[_Priority]()  # current round of each priority
        self._next_rounds: dict[tuple[_Priority, str], int] = {}  # of tenants with queued work
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"lorikeet-{name}-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None], *, urgent: bool, tenant: str = "") -> None:
        """Run work on one of the threads.

        urgent: the work precedes all work that is not urgent.
        tenant: tenant among whose work this counts, for fairness between tenants.
        """
        priority = _Priority.URGENT if urgent else _Priority.NORMAL
        with self._lock:
            if self._queue.empty():
                self._next_rounds.clear()
            at = max(self._rounds[priority], self._next_rounds.get((priority, tenant), 0))
            self._next_rounds[priority, tenant] = at + 1
            self._queue.put((priority, at, next(self._order), work))

    def close(self) -> None:
        """Start no more work. Work that hangs in a source ends with the process."""
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
