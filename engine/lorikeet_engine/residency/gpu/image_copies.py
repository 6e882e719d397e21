"""Copies of images from the host to the arena, and the thread that waits for their ends.

A large image is copied in parts. In a single part, 1.7 GB would occupy the PCIe bus for 35 ms, and
delay the uploads of steps' inputs. The parts in flight occupy the bus for at most a third of a
millisecond.
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
    """Checksum of an adapter's image that was copied to the GPU, available once the copy is
    complete. Implemented by Download, by PacedCopy, and for all ranks in rank_arenas.py.
    """

    def wait(self) -> torch.Tensor:
        """Return the checksum of the adapter's image as copied, [] int64, once the copy is
        complete.
        """
        ...


class CopyEvent(Protocol):
    """Event of a copy's completion. Implemented by PacedCopy, and for all ranks in
    rank_arenas.py.
    """

    def synchronize(self) -> None:
        """Sleep until the copy is complete. Some thread must call this, or the copy is never
        completed.
        """
        ...


class ImageCopy(NamedTuple):
    """A copy of an adapter's packed image to the arena (GPU memory for adapters), in flight.

    total: checksum (word_sum) of the image as it arrives in the arena.
    event: event that is complete once the copy and its checksum are complete; None if they are
        complete already, as on a CPU.
    """

    total: CopyTotal
    event: CopyEvent | None


class PacedCopy:
    """A copy to a GPU that is launched in parts. Serves as its own CopyEvent and CopyTotal.

    The engine's thread calls start and launch_all; the waiting thread calls synchronize and wait.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        blocks: Sequence[torch.Tensor],
        sources: Iterable[torch.Tensor],
    ) -> None:
        """Prepare the copy, without launching any part.

        stream: stream on which to copy.
        blocks: destinations in the arena, on the device.
        sources: memory to copy from, one for each block and of the same length; page-locked.
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
        """Whether all parts of the copy are launched."""
        return self._total is not None

    def start(self) -> None:
        """Launch the first parts of the copy.

        If this is never called, synchronize launches them.
        """
        with self._lock:
            self._launch(self._most)

    def launch_all(self) -> None:
        """Launch all remaining parts of the copy."""
        with self._lock:
            self._launch(len(self._parts) + len(self._under_way))

    def synchronize(self) -> None:
        """Launch the copy part by part, and sleep until it is complete."""
        self.start()
        while self._under_way:
            self._under_way[0].synchronize()
            self._under_way.popleft()
            self.start()

    def wait(self) -> torch.Tensor:
        """Return the checksum of the copied adapter, [] int64.

        Requires that synchronize has returned.
        """
        assert self._total is not None, "parts were not launched"
        return self._total.wait()

    def _launch(self, most: int) -> None:
        """Launch the next parts of the copy until `most` parts are in flight, or none are left."""
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
    """Launch the computation of the checksum of an adapter's image in the arena.

    The result's `wait` returns the checksum.

    blocks: the image's tensors in the arena (GPU memory for adapters).
    """
    return Download(reduce(add, map(word_sum, blocks)))


def _parts(
    blocks: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    for block, source in zip(blocks, sources, strict=True):
        most = _PART_BYTES // block.itemsize
        yield from zip(torch.split(block, most), torch.split(source, most), strict=True)


class FinishedCopy(NamedTuple):
    """A completed copy of an adapter's packed image to the GPU.

    elements: size of the image.
    took_s: seconds that the copy took, without waiting for earlier copies.
    total: checksum of the image as it arrived on the GPU.
    """

    digest: str
    elements: int
    took_s: float
    total: int


class ImageCopies:
    """Copies of adapters' packed images to the GPU, in flight. For the engine's thread only, except
    `elements`.

    wake: called on another thread when a copy is complete.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._worker = Workers(1, "copies")  # one, so copies end in order
        self._under_way: dict[str, int] = {}
        self._last_end_s = 0.0
        self._finished: deque[FinishedCopy] = deque()

    @property
    def elements(self) -> int:
        """Number of elements that are being copied to the GPU."""
        return sum(self._under_way.values())

    def track(self, digest: str, elements: int, began_s: float, copy: ImageCopy) -> None:
        """Watch a copy: a thread waits for its end, and then `finished` returns it.

        elements: size of the adapter's image.
        began_s: time.perf_counter() at which the copy began.
        copy: the copy; on a CPU it is complete already.
        """
        self._under_way[digest] = elements
        ended = partial(self._ended, digest, elements, began_s, copy.total)
        if copy.event is None:
            ended()
        else:
            self._worker.submit(partial(self._wait, copy.event, ended), urgent=True)

    def finished(self) -> list[FinishedCopy]:
        """Return the copies that were completed since the last call."""
        copies = [self._finished.popleft() for _ in range(len(self._finished))]
        for copy in copies:
            del self._under_way[copy.digest]
        return copies

    def close(self) -> None:
        """Stop waiting for copies."""
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
