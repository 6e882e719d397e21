"""What a format of quantised linears must tell, and what it reads them with."""

from collections.abc import Collection
from typing import Protocol

import torch


class PartReader(Protocol):
    """Reads tensors as they are stored. Implemented by Checkpoint."""

    def part(self, name: str, dtype: str, *shape: int) -> torch.Tensor:
        """A stored tensor on the device; on the meta device without its values.

        dtype: its name in safetensors. Raises ModelError, whose `field` is the name, where it is
        missing or another.
        """

    def scales(self, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """A stored tensor of floats that has one of these shapes, in float32 on the device.

        Raises ModelError.
        """

    def stored_bytes(self, name: str) -> bytes:
        """The bytes of a small tensor, also on the meta device. Raises ModelError."""


class WeightFormat(Protocol):
    """How a checkpoint stores linears. Implemented by Nf4, Int4 and Fp8."""

    def holds(self, weight: str, stored: Collection[str]) -> bool:
        """Whether a weight is stored in this format, by the names of all tensors."""

    def dequantize(self, weight: str, d_out: int, d_in: int, parts: PartReader) -> torch.Tensor:
        """The weight's exact values, [d_out, d_in], in the format's dtype. Raises ModelError."""
