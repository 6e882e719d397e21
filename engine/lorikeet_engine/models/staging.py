"""Copies of tensors from files to a device, through a few reused staging buffers."""

import math
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from lorikeet_engine.errors import ModelError
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.load_progress import LoadProgress

READERS = 4
STAGING_BYTES = 16 << 20  # of each reader's buffer


@dataclass(frozen=True, slots=True)
class Span:
    """Position of a tensor in a file: rows of `width` elements from byte `begin` on.

    columns: columns to copy of each row. If all columns are copied, the tensor counts as rows of
        one element each.
    """

    file: Path
    begin: int
    dtype: torch.dtype
    width: int
    columns: range

    @classmethod
    def of(cls, file: Path, begin: int, dtype: torch.dtype, cut: Cut) -> "Span":
        """Return the span of the kept part of a tensor that starts at byte `begin` of a file."""
        width = math.prod(cut.matrix_shape[1:])
        begin += cut.rows.start * width * dtype.itemsize
        if cut.kept_shape[1:] == cut.matrix_shape[1:]:  # dense, in pieces of any length
            return cls(file, begin, dtype, 1, range(1))
        assert cut.columns is not None
        return cls(file, begin, dtype, width, cut.columns)


class Staging:
    """Threads that copy tensors from files to a device, each through a buffer of its own.

    Files are read piece by piece. On CUDA buffers are pinned.

    progress: counts the bytes read.
    """

    def __init__(self, device: torch.device, progress: LoadProgress) -> None:
        self._device, self._progress = device, progress
        self._pool = ThreadPoolExecutor(READERS, "read-weights")
        self._own = threading.local()
        self._copies: list[Future[None]] = []

    def copy(self, span: Span, out: torch.Tensor) -> None:
        """Start to fill `out` with the elements of a file's span, cast to out's dtype.

        out: contiguous tensor.
        """
        rows = out.view(-1, len(span.columns))
        most = STAGING_BYTES // (span.width * span.dtype.itemsize)
        for first in range(0, len(rows), most):
            piece = rows[first : first + most]
            # in a list that the copy empties: a thread keeps its last arguments for a while
            self._copies.append(self._pool.submit(self._copy, span, first, [piece]))

    def finish(self) -> None:
        """Wait for all copies started so far, after which no thread refers to their memory.

        Raises ModelError if a file ended early.
        """
        for copy in self._copies:
            copy.result()
        self._copies.clear()

    def close(self) -> None:
        """Cancel the copies of all pieces of files that are not yet read, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _copy(self, span: Span, first: int, piece: list[torch.Tensor]) -> None:
        out = piece.pop()
        row_bytes, columns = span.width * span.dtype.itemsize, span.columns
        buffer = self._buffer()[: len(out) * row_bytes]
        read_bytes(span.file, span.begin + first * row_bytes, buffer)
        self._progress.add(buffer.nbytes)
        # cut and cast on the device, to spare the host's time
        rows = buffer.view(span.dtype).to(out.device, non_blocking=True).view(-1, span.width)
        out.copy_(rows[:, columns.start : columns.stop])
        if self._device.type == "cuda":
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            # a new thread's current stream is the first GPU's
            copied.record(torch.cuda.current_stream(self._device))
            copied.synchronize()

    def _buffer(self) -> torch.Tensor:
        if not hasattr(self._own, "buffer"):
            pin = self._device.type == "cuda"
            self._own.buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=pin)
        buffer: torch.Tensor = self._own.buffer
        return buffer


def read_bytes(file: Path, begin: int, out: torch.Tensor) -> None:
    """Fill a tensor of bytes from a file, from byte `begin` on.

    Raises ModelError if the file ends early.
    """
    left = out.numpy().data
    with file.open("rb", buffering=0) as stream:
        stream.seek(begin)
        while left:
            count = stream.readinto(left)
            if not count:
                raise ModelError(f"{file} ended early: it was changed", field=file.name)
            left = left[count:]
