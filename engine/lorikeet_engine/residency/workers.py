"""Background threads for work that waits: on a network, a disk, a long copy."""

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from enum import IntEnum

log = logging.getLogger(__name__)

_JOIN_S = 2.0


class _Turn(IntEnum):
    """The order of work: the least first."""

    CLOSE = 0
    URGENT = 1
    LATER = 2


class Workers:
    """A few daemon threads; urgent work goes first, otherwise in order of submission."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.PriorityQueue[tuple[_Turn, int, Callable[[], None]]]
        self._queue = queue.PriorityQueue()
        self._order = itertools.count()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"lorikeet-{name}-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None], *, urgent: bool) -> None:
        """Run work on one of the threads."""
        turn = _Turn.URGENT if urgent else _Turn.LATER
        self._queue.put((turn, next(self._order), work))

    def close(self) -> None:
        """Start nothing more. What hangs in a source is left to end with the process."""
        self._closed = True
        for _ in self._threads:
            self._queue.put((_Turn.CLOSE, next(self._order), lambda: None))
        for thread in self._threads:
            thread.join(_JOIN_S / len(self._threads))

    def _run(self) -> None:
        while True:
            work = self._queue.get()[2]
            if self._closed:
                return
            try:
                work()
            except Exception:
                log.exception("background_work_failed")
