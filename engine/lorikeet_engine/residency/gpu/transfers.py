"""Images on their way to the GPU, and the thread that waits for them."""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from lorikeet_engine.residency.workers import Workers


class FinishedCopy(NamedTuple):
    """A copy that is over. took_s: without the copies before it."""

    digest: str
    elements: int
    took_s: float


class Transfers:
    """Copies under way. Belongs to the engine's thread, `elements` to any.

    wake: called when one is over.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._worker = Workers(1, "copies")  # in their order
        self._under_way: dict[str, int] = {}
        self._last_end_s = 0.0
        self._finished: deque[tuple[str, float]] = deque()

    @property
    def elements(self) -> int:
        """Elements that are being copied."""
        return sum(self._under_way.values())

    def track(self, digest: str, elements: int, began_s: float, event: torch.cuda.Event) -> None:
        """Wait, on a thread, for a copy that has begun; `event` is over when it is."""
        self._under_way[digest] = elements
        self._worker.submit(partial(self._wait, digest, began_s, event), urgent=True)

    def finished(self) -> list[FinishedCopy]:
        """Copies that ended since the last call."""
        ended = [self._finished.popleft() for _ in range(len(self._finished))]
        return [
            FinishedCopy(digest, self._under_way.pop(digest), took_s) for digest, took_s in ended
        ]

    def close(self) -> None:
        """Wait for no more copies."""
        self._worker.close()

    def _wait(self, digest: str, began_s: float, event: torch.cuda.Event) -> None:
        event.synchronize()
        end_s = time.perf_counter()
        took_s = end_s - max(began_s, self._last_end_s)
        self._last_end_s = end_s
        self._finished.append((digest, took_s))
        self._wake()
