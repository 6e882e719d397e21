"""Which part of a checkpoint's tensors a process keeps, where several share the model's layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of a tensor of this shape: rows, and of a matrix columns, if not all of them.

    A tensor of several matrices counts as one, in which they stand on top of one another.
    """

    shape: tuple[int, ...]
    rows: range
    columns: range | None = None

    @classmethod
    def whole(cls, *shape: int) -> "Cut":
        """All of a tensor [rows, …]."""
        return cls(shape, range(shape[0]), range(shape[1]) if len(shape) == 2 else None)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """The shape of what is kept."""
        kept = tuple(len(side) for side in self._sides)
        return kept + self.matrix_shape[len(kept) :]

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape in which rows and columns are counted."""
        return (math.prod(self.shape[:-1]), *self.shape[-1:]) if len(self.shape) > 2 else self.shape

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is kept of a tensor of this shape: a view of it."""
        kept = tuple(slice(side.start, side.stop) for side in self._sides)
        return tensor.view(self.matrix_shape)[kept]

    @property
    def _sides(self) -> tuple[range, ...]:
        return (self.rows,) if self.columns is None else (self.rows, self.columns)


def stack(
    cuts: Sequence[Cut], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """An empty tensor for what is kept of several, one on top of another, and the views for each.

    All keep as many columns.
    """
    heights = [len(cut.rows) for cut in cuts]
    out = torch.empty(sum(heights), *cuts[0].kept_shape[1:], device=device, dtype=dtype)
    return out, torch.split(out, heights)
