"""Images on their way to the GPU, and the thread that waits for them."""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from lorikeet_engine.residency.gpu.image_copy import CopyEvent, CopyTotal, ImageCopy
from lorikeet_engine.residency.workers import Workers


class FinishedCopy(NamedTuple):
    """A copy that is over. took_s: without the copies before it. total: ImageCopy's."""

    digest: str
    elements: int
    took_s: float
    total: int


class Transfers:
    """Copies under way. Belongs to the engine's thread, `elements` to any.

    wake: called when one is over.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._worker = Workers(1, "copies")  # in their order
        self._under_way: dict[str, int] = {}
        self._last_end_s = 0.0
        self._finished: deque[FinishedCopy] = deque()

    @property
    def elements(self) -> int:
        """Elements that are being copied."""
        return sum(self._under_way.values())

    def track(self, digest: str, elements: int, began_s: float, copy: ImageCopy) -> None:
        """Wait, on a thread, for a copy that has begun; on a CPU it is over already."""
        self._under_way[digest] = elements
        ended = partial(self._ended, digest, elements, began_s, copy.total)
        if copy.event is None:
            ended()
        else:
            self._worker.submit(partial(self._wait, copy.event, ended), urgent=True)

    def finished(self) -> list[FinishedCopy]:
        """Copies that ended since the last call."""
        copies = [self._finished.popleft() for _ in range(len(self._finished))]
        for copy in copies:
            del self._under_way[copy.digest]
        return copies

    def close(self) -> None:
        """Wait for no more copies."""
        self._worker.close()

    def _wait(self, event: CopyEvent, ended: Callable[[], None]) -> None:
        event.synchronize()
        ended()
        self._wake()

    def _ended(self, digest: str, elements: int, began_s: float, total: CopyTotal) -> None:
        end_s = time.perf_counter()
        took_s = end_s - max(began_s, self._last_end_s)
        self._last_end_s = end_s
        self._finished.append(FinishedCopy(digest, elements, took_s, int(total.wait())))
