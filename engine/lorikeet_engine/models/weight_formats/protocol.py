"""Interface of formats of quantised linears, and of the reader that they use."""

from typing import ClassVar, Protocol

import torch


class PartReader(Protocol):
    """Reader of tensors as they are stored. Implemented by Checkpoint."""

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""

    def part(self, name: str, dtype: str, *shape: int) -> torch.Tensor:
        """Read a stored tensor to the device; on the meta device without values.

        Raises ModelError, whose `field` is the name, if the tensor is missing or has another dtype
        or shape.

        dtype: safetensors' name of the dtype.
        """

    def scales(self, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """Read a tensor of floats that has one of these shapes, in its stored dtype.

        Raises ModelError.
        """

    def stored_bytes(self, name: str) -> bytes:
        """Read the bytes of a small tensor, on the meta device too. Raises ModelError."""


class WeightFormat(Protocol):
    """Format in which a checkpoint stores linears. Implemented by Nf4, Int4 and Fp8.

    marks: suffixes that mark a linear of this format: the checkpoint has a tensor named by the
        linear's path and one of them.
    """

    marks: ClassVar[tuple[str, ...]]

    def dequantize(self, weight: str, d_out: int, d_in: int, parts: PartReader) -> torch.Tensor:
        """Return the weight's exact values [d_out, d_in], in the format's dtype.

        Raises ModelError.
        """
