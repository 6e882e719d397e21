"""Tensors from files to a device, through a few staging buffers that are used again and again."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from lorikeet_engine.errors import ModelError

READERS = 4
STAGING_BYTES = 16 << 20  # of each reader


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor lies: its elements, dense, from byte `begin` of the file on."""

    file: Path
    begin: int
    dtype: torch.dtype


class Staging:
    """Threads that read files piece by piece, each into a buffer of its own.

    While one waits for its copy to the device the others read on. On CUDA the buffers are pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(READERS, "read-weights")
        self._own = threading.local()
        self._copies: list[Future[None]] = []

    def copy(self, span: Span, out: torch.Tensor) -> None:
        """Begin to fill out, which is dense, with a span of as many elements, cast to its dtype."""
        flat, most = out.view(-1), STAGING_BYTES // span.dtype.itemsize
        for first in range(0, flat.numel(), most):
            piece = flat[first : first + most]
            self._copies.append(self._pool.submit(self._copy, span, first, piece))

    def finish(self) -> None:
        """Wait until all that was begun is copied. Raises ModelError where a file ended early."""
        for copy in self._copies:
            copy.result()
        self._copies.clear()

    def close(self) -> None:
        """Give up what is not yet read."""
        self._pool.shutdown(cancel_futures=True)

    def _copy(self, span: Span, first: int, out: torch.Tensor) -> None:
        buffer = self._buffer()[: out.numel() * span.dtype.itemsize]
        _read(span.file, span.begin + first * span.dtype.itemsize, buffer)
        # cast where the copy is going, in that device's time
        out.copy_(buffer.view(span.dtype).to(out.device, non_blocking=True))
        if self._device.type == "cuda":
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
            copied.synchronize()

    def _buffer(self) -> torch.Tensor:
        if not hasattr(self._own, "buffer"):
            pin = self._device.type == "cuda"
            self._own.buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=pin)
        buffer: torch.Tensor = self._own.buffer
        return buffer


def _read(file: Path, begin: int, out: torch.Tensor) -> None:
    left = out.numpy().data
    with file.open("rb", buffering=0) as stream:
        stream.seek(begin)
        while left:
            count = stream.readinto(left)
            if not count:
                raise ModelError(f"{file} ended early: it was changed", field=file.name)
            left = left[count:]
