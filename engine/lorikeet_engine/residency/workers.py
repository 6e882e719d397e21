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

    Queued work is done in rounds. Each round has at most one piece of work of each tenant, done in
    the order of arrival, so a tenant with hundreds of loads delays only its own work. New work
    joins the round after its tenant's last queued work, but never a past one. Thread-safe.

    count: number of threads.
    name: names the threads.
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
        """Queue work for one of the threads.

        urgent: whether the work precedes all work that is not urgent.
        tenant: tenant for whom the work is done.
        """
        priority = _Priority.URGENT if urgent else _Priority.NORMAL
        with self._lock:
            if self._queue.empty():
                self._next_rounds.clear()
            at = max(self._rounds[priority], self._next_rounds.get((priority, tenant), 0))
            self._next_rounds[priority, tenant] = at + 1
            self._queue.put((priority, at, next(self._order), work))

    def close(self) -> None:
        """Begin no more queued work.

        A thread whose work hangs in a download ends with the process.
        """
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
