"""Images on their way to the GPU, and the thread that waits for them."""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from lorikeet_engine.residency.workers import Workers


class Copied(NamedTuple):
    """A copy that is over. took_s: without those before it."""

    digest: str
    elements: int
    took_s: float


class Transfers:
    """Belongs to the engine's thread, `elements` to any. `wake` is called when one is over."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._worker = Workers(1, "copies")  # in their order
        self._under_way: dict[str, int] = {}
        self._last_over_s = 0.0
        self._over: deque[tuple[str, float]] = deque()

    @property
    def elements(self) -> int:
        """What is under way."""
        return sum(self._under_way.values())

    def follow(self, digest: str, elements: int, began_s: float, event: torch.cuda.Event) -> None:
        """A copy has begun; `event` is over when it is."""
        self._under_way[digest] = elements
        self._worker.submit(partial(self._wait, digest, began_s, event), urgent=True)

    def over(self) -> list[Copied]:
        """Those that ended since the last call."""
        ended = [self._over.popleft() for _ in range(len(self._over))]
        return [Copied(digest, self._under_way.pop(digest), took_s) for digest, took_s in ended]

    def close(self) -> None:
        """Wait for no more."""
        self._worker.close()

    def _wait(self, digest: str, began_s: float, event: torch.cuda.Event) -> None:
        event.synchronize()
        over_s = time.perf_counter()
        took_s = over_s - max(began_s, self._last_over_s)
        self._last_over_s = over_s
        self._over.append((digest, took_s))
        self._wake()
