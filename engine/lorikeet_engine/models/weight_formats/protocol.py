"""What a format of quantised linears must tell, and what it reads them with."""

from typing import ClassVar, Protocol

import torch


class PartReader(Protocol):
    """Reads tensors as they are stored. Implemented by Checkpoint."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def part(self, name: str, dtype: str, *shape: int) -> torch.Tensor:
        """A stored tensor on the device; on the meta device without its values.

        dtype: its name in safetensors. Raises ModelError, whose `field` is the name, where it is
        missing or another.
        """

    def scales(self, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """A stored tensor of floats that has one of these shapes, in its own dtype.

        Raises ModelError.
        """

    def stored_bytes(self, name: str) -> bytes:
        """The bytes of a small tensor, also on the meta device. Raises ModelError."""


class WeightFormat(Protocol):
    """How a checkpoint stores linears. Implemented by Nf4, Int4 and Fp8.

    marks: what the names of tensors that this format alone has put after a linear's, any of them.
    """

    marks: ClassVar[tuple[str, ...]]

    def dequantize(self, weight: str, d_out: int, d_in: int, parts: PartReader) -> torch.Tensor:
        """The weight's exact values, [d_out, d_in], in the format's dtype. Raises ModelError."""
