"""Linears of FP8 (E4M3): 8-bit floats with 4 bits of exponent and 3 of fraction, up to 448.

A weight has a scale for each output, or for each of its blocks, as checkpoints of DeepSeek's kind
have it. A product's input is rounded to FP8 as well, with a scale for each token, that of its
largest element ("W8A8"). What adapters add reads the input as it was.

`reference` is the equation in torch and runs on the CPU; `fused` is the product on CUDA, with the
same signature, where a single row is multiplied unrounded (kernels/gemv.py).
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from lorikeet_engine.errors import SettingsError

FIRST_WITH_FP8 = (8, 9)
"""The first GPUs that have it, Ada and Hopper, by compute capability."""
DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_SCALE = 2.0**-100  # of a row of zeros
BLOCK_WIDTHS = 32
"""Blocks with scales are as wide as a multiple of this, which tensor cores multiply at once."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix M[r, c] = rows[r, c] · scales[r]: a weight's outputs, or the tokens of an input.

    rows [rows, width] FP8, dense; scales [rows] float32. Or a matrix of each of a layer's experts:
    rows [experts, rows, width], scales [experts, rows].

    block: the height and width of a weight's blocks, each with a scale of its own, M[r, c] =
    rows[r, c] · scales[r // height, c // width]; the last dimensions of scales count blocks. Where
    there are several matrices, the height divides their rows.
    """

    rows: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of rows and scales."""
        return self.rows.nbytes + self.scales.nbytes

    def __getitem__(self, index: Any) -> "Fp8Rows":
        """Some of the rows, if these have the scales, or an expert's."""
        return Fp8Rows(self.rows[index], self.scales[index], self.block)

    def floats(self) -> torch.Tensor:
        """M in float32."""
        if self.block is None:
            return self.rows.float() * self.scales[..., None]
        height, width = self.block
        scales = self.scales.repeat_interleave(height, -2).repeat_interleave(width, -1)
        return self.rows.float() * scales[..., : self.rows.shape[-2], : self.rows.shape[-1]]


@dataclass(frozen=True, slots=True)
class Activations:
    """What linears read: rows [tokens, width], and fp8, these rounded."""

    rows: torch.Tensor
    fp8: Fp8Rows


def linear(
    x: torch.Tensor,
    weight: Fp8Rows,
    bias: torch.Tensor | None = None,
    rounded: Fp8Rows | None = None,
) -> torch.Tensor:
    """Q(x)·Wᵀ + b, with Q(x) each token of x rounded to FP8 times its scale; sums are float32.

    x [tokens, d_in], dense in a token; bias [d_out] → [tokens, d_out] like x. rounded: Q(x), where
    it is at hand.
    """
    y: torch.Tensor = _operators(x.device.type).linear(x, weight, bias, rounded)
    return y


def kernel_arguments(
    weight: torch.Tensor | Fp8Rows,
) -> tuple[torch.Tensor, torch.Tensor | None, int, int]:
    """A weight's numbers, their scales, and the height and width of the blocks that have them.

    The width is 0 where rows have scales, or nothing has.
    """
    if isinstance(weight, Fp8Rows):
        return weight.rows, weight.scales, *(weight.block or (1, 0))
    return weight, None, 1, 0


def rounds(weight: object, tokens: int) -> bool:
    """Whether a product of N tokens by a linear's weight rounds them to FP8.

    A single token stays as it is (fused.linear).
    """
    return isinstance(weight, Fp8Rows) and tokens > 1


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise SettingsError where a device has no FP8 products that give this dtype."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_WITH_FP8:
        raise SettingsError(
            f"FP8 weights need a GPU of compute capability 8.9 or above (Ada or Hopper), {device} "
            f"has {'.'.join(map(str, capability))}: want a checkpoint of floats, weight_dtype=auto"
        )
    if dtype is not torch.bfloat16:  # all that torch's product gives on Ada, too
        raise SettingsError(f"dtype={dtype}: FP8 weights want bfloat16 on a GPU")


@cache
def _operators(device_type: str) -> ModuleType:
    # Triton is imported only here: a machine without a GPU may have none.
    name = "fused" if device_type == "cuda" else "reference"
    return import_module(f"lorikeet_engine.kernels.fp8.{name}")
