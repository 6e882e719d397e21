"""Interface of formats of quantised linears, and of the reader that they use."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.w4a16 import PackedWeight


class PartReader(Protocol):
    """Reader of a checkpoint's tensors as they are stored. Implemented by Checkpoint."""

    def __contains__(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of this name."""

    def part(self, name: str, dtype: str, *shape: int) -> torch.Tensor:
        """Read a tensor in its stored dtype to the device; to the meta device without values.

        Raises ModelError, whose `field` is the tensor's name, if it is missing or has another dtype
        or shape.

        dtype: dtype that the tensor must have, by safetensors' name.
        shape: shape that it must have.
        """

    def scales(self, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """Read a tensor of floats in its stored dtype; it must have one of these shapes.

        Raises ModelError if it is missing or has another shape or dtype.
        """

    def stored_bytes(self, name: str) -> bytes:
        """Read the bytes of a small tensor, even if the checkpoint's device is meta.

        Raises ModelError if the tensor is missing or its dtype is not U8.
        """


class WeightFormat(Protocol):
    """Format in which a checkpoint stores quantised linears. Implemented by Nf4, Int4, Mxfp4
    and Fp8.

    marks: suffixes by which a linear of this format is recognised: the checkpoint has a tensor
        whose name is the linear's path plus one of the suffixes.
    """

    @property
    def marks(self) -> tuple[str, ...]:
        """Suffixes by which a linear of this format is recognised: the checkpoint has a tensor
        whose name is the linear's path plus one of them.
        """

    def dequantize(self, weight: str, shape: Sequence[int], parts: PartReader) -> torch.Tensor:
        """Return a weight's exact values, in the dtype that the format determines.

        Raises ModelError if a tensor is missing or malformed.

        weight: name of the weight.
        shape: shape of the weight.
        parts: reader of the stored tensors.
        """


@runtime_checkable
class PackedFormat(WeightFormat, Protocol):
    """Format of linears of 4 bits that can stay packed. Implemented by Nf4 and Int4."""

    def pack(self, weight: str, shape: Sequence[int], parts: PartReader) -> PackedWeight:
        """Return a weight packed for the kernels, with its exact values.

        Raises ModelError if a tensor is missing or malformed, or if the kernels have no place for
        the weight's groups.

        weight: name of the weight.
        shape: (d_out, d_in).
        parts: reader of the stored tensors.
        """


def not_divided(weight: str, error: ValueError) -> ModelError:
    """Return the error for a weight of which a process cannot keep its part in 4 bits.

    weight: name of the weight.
    error: says what cannot be divided.
    """
    return ModelError(
        f"weight_dtype=packed: {weight} cannot be divided among GPUs in 4 bits: {error}: want "
        "another number of GPUs, or weight_dtype=auto",
        field="weight_dtype",
    )


def not_packed(weight: str, error: ValueError, instead: str = "auto") -> ModelError:
    """Return the error for a weight that cannot stay packed.

    weight: name of the weight.
    error: says what cannot be packed.
    instead: weight_dtype with which the weight can be served.
    """
    return ModelError(
        f"{weight} cannot stay in 4 bits: {error}: want weight_dtype={instead}",
        field="weight_dtype",
    )
