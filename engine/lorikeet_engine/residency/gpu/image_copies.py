"""Copies of images from the host to the arena, and the thread that waits for them.

A large image is copied in parts. At once, 1.7 GB would occupy the bus for 35 ms, and uploads of the
steps would wait for that. So no more is in flight than occupies the bus for a third of a
millisecond, and the waiting thread launches the next part whenever one is over.
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
    """Pending sum of a copied image. Implemented by Download and PacedCopy."""

    def wait(self) -> torch.Tensor:
        """Return the sum [] int64, after the end of the copy."""
        ...


class CopyEvent(Protocol):
    """End of a copy. Implemented by PacedCopy."""

    def synchronize(self) -> None:
        """Sleep until the copy is over. One thread must call this, or the copy stays incomplete."""
        ...


class ImageCopy(NamedTuple):
    """A copy in flight.

    total: word_sum of the copied image in the arena.
    event: over when the copy and its sum are done; None if both are done already, as on a CPU.
    """

    total: CopyTotal
    event: CopyEvent | None


class PacedCopy:
    """A copy on a stream, launched in parts: its CopyEvent and its CopyTotal.

    start and launch_all are for the engine's thread, synchronize and wait for the waiting thread.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        blocks: Sequence[torch.Tensor],
        sources: Iterable[torch.Tensor],
    ) -> None:
        """blocks: destinations in the arena, on the device.

        sources: of the same lengths, in page-locked memory.
        """
        self._stream, self._blocks = stream, blocks
        self._parts = deque(_parts(blocks, sources))
        at_once = sum(block.nbytes for block in blocks) <= _AT_ONCE_BYTES
        self._most = len(self._parts) if at_once else _PARTS_UNDER_WAY
        self._under_way: deque[torch.cuda.Event] = deque()
        self._total: Download | None = None  # None until all parts are launched
        self._lock = threading.Lock()

    @property
    def launched(self) -> bool:
        """Whether all parts are launched."""
        return self._total is not None

    def start(self) -> None:
        """Launch the first parts; otherwise, synchronize does."""
        with self._lock:
            self._launch(self._most)

    def launch_all(self) -> None:
        """Launch all remaining parts."""
        with self._lock:
            self._launch(len(self._parts) + len(self._under_way))

    def synchronize(self) -> None:
        """Launch part after part, and sleep until the copy is over."""
        self.start()
        while self._under_way:
            self._under_way[0].synchronize()
            self._under_way.popleft()
            self.start()

    def wait(self) -> torch.Tensor:
        """Return the sum [] int64, after synchronize."""
        assert self._total is not None, "parts were not launched"
        return self._total.wait()

    def _launch(self, most: int) -> None:
        """Launch parts until `most` are in flight."""
        if self.launched:
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
    """Begin the sum of an image's blocks."""
    return Download(reduce(add, map(word_sum, blocks)))


def _parts(
    blocks: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    for block, source in zip(blocks, sources, strict=True):
        most = _PART_BYTES // block.itemsize
        yield from zip(torch.split(block, most), torch.split(source, most), strict=True)


class FinishedCopy(NamedTuple):
    """A copy that is over.

    took_s: seconds of the copy, without earlier copies.
    total: sum of the copied image.
    """

    digest: str
    elements: int
    took_s: float
    total: int


class ImageCopies:
    """Copies in flight. Engine thread only, except `elements`.

    wake: called when a copy is over.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._worker = Workers(1, "copies")  # one, so copies end in order
        self._under_way: dict[str, int] = {}
        self._last_end_s = 0.0
        self._finished: deque[FinishedCopy] = deque()

    @property
    def elements(self) -> int:
        """Elements that are being copied."""
        return sum(self._under_way.values())

    def track(self, digest: str, elements: int, began_s: float, copy: ImageCopy) -> None:
        """Wait on a thread for a copy that has begun; on a CPU, take note that it is over."""
        self._under_way[digest] = elements
        ended = partial(self._ended, digest, elements, began_s, copy.total)
        if copy.event is None:
            ended()
        else:
            self._worker.submit(partial(self._wait, copy.event, ended), urgent=True)

    def finished(self) -> list[FinishedCopy]:
        """Return the copies that ended since the last call."""
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
