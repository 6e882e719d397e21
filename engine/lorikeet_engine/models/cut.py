"""Parts of a checkpoint's tensors that a tensor parallel process keeps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a checkpoint's tensor that a tensor parallel process keeps.

    shape: shape of the whole tensor, as in the checkpoint.
    rows: rows to keep. The rows of a tensor [matrices, rows, columns] are counted through all its
        matrices.
    columns: columns of a matrix to keep; None: all.
    """

    shape: tuple[int, ...]
    rows: range
    columns: range | None = None

    @classmethod
    def whole(cls, *shape: int) -> "Cut":
        """Return a Cut that keeps the whole of a tensor of this shape."""
        return cls(shape, range(shape[0]), range(shape[1]) if len(shape) == 2 else None)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the part of the tensor that the process keeps."""
        kept = tuple(len(side) for side in self._sides)
        return kept + self.matrix_shape[len(kept) :]

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor when seen as one matrix; `rows` and `columns` are numbered in
        this matrix.
        """
        return (math.prod(self.shape[:-1]), *self.shape[-1:]) if len(self.shape) > 2 else self.shape

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the part of `tensor` to keep; the tensor has the shape `shape`."""
        kept = tuple(slice(side.start, side.stop) for side in self._sides)
        return tensor.view(self.matrix_shape)[kept]

    @property
    def _sides(self) -> tuple[range, ...]:
        return (self.rows,) if self.columns is None else (self.rows, self.columns)


def stack(
    cuts: Sequence[Cut], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Allocate a tensor for the kept parts of several tensors, stacked by rows.

    Returns the tensor and a view of each part. All parts have the same number of columns.
    """
    heights = [len(cut.rows) for cut in cuts]
    out = torch.empty(sum(heights), *cuts[0].kept_shape[1:], device=device, dtype=dtype)
    return out, torch.split(out, heights)
