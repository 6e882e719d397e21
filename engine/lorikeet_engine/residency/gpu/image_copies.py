"""A copy of an image from the host to the arena; a large one is given to the device part by part.

All at once, 1.7 GB would take the bus for 35 ms, and what the steps meanwhile upload would wait
for its end. So no more is under way than takes the bus a third of a millisecond, and the thread
that waits for the copy gives the next part whenever one is over.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import add
from typing import NamedTuple, Protocol

import torch

from lorikeet_engine.device.async_copies import Download
from lorikeet_engine.residency.checksums import word_sum
from lorikeet_engine.residency.workers import Workers

_PART_BYTES = 8 << 20
_PARTS_UNDER_WAY = 2
_AT_ONCE_BYTES = 256 << 20  # 5 ms of the bus; 168 MB at once lengthened gaps by 0.3% (p99)


class CopyTotal(Protocol):
    """A copy's sum, on its way. Implemented by Download (device/async_copies.py) and PacedCopy."""

    def wait(self) -> torch.Tensor:
        """The sum [] int64, once the copy is over."""
        ...


class CopyEvent(Protocol):
    """A copy's end. Implemented by PacedCopy."""

    def synchronize(self) -> None:
        """Sleep until the copy is over. For one thread, without which not all is copied."""
        ...


class ImageCopy(NamedTuple):
    """A copy under way. total: word_sum of what lies in the arena then.

    event: over when all is done, the total included; None where it is done, as on a CPU alone.
    """

    total: CopyTotal
    event: CopyEvent | None


class PacedCopy:
    """A copy on a stream: its CopyEvent and its CopyTotal.

    start and give_all are for the engine's thread, synchronize and wait for the one that waits.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        blocks: Sequence[torch.Tensor],
        sources: Iterable[torch.Tensor],
    ) -> None:
        """blocks: of the arena, on the device. sources: as long, in pinned memory."""
        self._stream, self._blocks = stream, blocks
        self._parts = deque(_parts(blocks, sources))
        at_once = sum(block.nbytes for block in blocks) <= _AT_ONCE_BYTES
        self._most = len(self._parts) if at_once else _PARTS_UNDER_WAY
        self._under_way: deque[torch.cuda.Event] = deque()
        self._total: Download | None = None  # until all parts are given
        self._lock = threading.Lock()

    @property
    def given(self) -> bool:
        """Whether the device has all of it."""
        return self._total is not None

    def start(self) -> None:
        """Give the device the first parts; without it, synchronize does."""
        with self._lock:
            self._give(self._most)

    def give_all(self) -> None:
        """Give the device all that it has not."""
        with self._lock:
            self._give(len(self._parts) + len(self._under_way))

    def synchronize(self) -> None:
        """Give the device part after part, and sleep until the copy is over."""
        self.start()
        while self._under_way:
            self._under_way[0].synchronize()
            self._under_way.popleft()
            self.start()

    def wait(self) -> torch.Tensor:
        """The sum [] int64, after synchronize."""
        assert self._total is not None, "parts were not given"
        return self._total.wait()

    def _give(self, most: int) -> None:
        """Give the device parts until so many are under way."""
        if self.given:
            return
        with torch.cuda.stream(self._stream):
            while self._parts and len(self._under_way) < most:
                into, source = self._parts.popleft()
                into.copy_(source, non_blocking=True)
                if not self._parts:
                    self._total = sum_of(self._blocks)
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(self._stream)
                self._under_way.append(event)


def sum_of(blocks: Iterable[torch.Tensor]) -> Download:
    """The sum of an image's blocks, on its way."""
    return Download(reduce(add, map(word_sum, blocks)))


def _parts(
    blocks: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    for block, source in zip(blocks, sources, strict=True):
        most = _PART_BYTES // block.itemsize
        yield from zip(torch.split(block, most), torch.split(source, most), strict=True)


class FinishedCopy(NamedTuple):
    """A copy that is over. took_s: without the copies before it. total: ImageCopy's."""

    digest: str
    elements: int
    took_s: float
    total: int


class ImageCopies:
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
