"""Linear layers with FP8 weights (E4M3: 4 bits of exponent, 3 of fraction, up to 448).

A weight has a scale for each output, or for each block of the weight, as in DeepSeek's checkpoints.
A product's input is rounded to FP8 too ("W8A8"), with a scale for each token, which the token's
largest element determines. LoRA reads the input unrounded.

`fused` multiplies a single token unrounded (kernels/gemv.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from lorikeet_engine.errors import SettingsError
from lorikeet_engine.kernels.by_device import by_device

FIRST_WITH_FP8 = (8, 9)
"""Lowest CUDA compute capability with FP8 products: 8.9, Ada."""
DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_SCALE = 2.0**-100  # scale of a row of zeros
BLOCK_WIDTHS = 32
"""Number that divides the width of every weight block with a scale.

Tensor cores multiply this many inputs at a time.
"""
_ROWS_AT_ONCE = 1024  # bounds the float32 copies beside a weight


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """FP8 matrix M[r, c] = rows[r, c] · scales[r]: a weight, or a linear layer's input tokens.

    With blocks, M[r, c] = rows[r, c] · scales[r // height, c // width].

    rows [rows, width] FP8, contiguous; for a layer's experts [experts, rows, width].
    scales [rows] float32; for experts [experts, rows]; with blocks, its last two dimensions count
        blocks instead of rows.
    block: height and width of a weight's blocks; None: each row has a scale. For experts, the
        height divides each matrix's rows.
    """

    rows: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the FP8 elements and of their scales."""
        return self.rows.nbytes + self.scales.nbytes

    def __getitem__(self, index: Any) -> "Fp8Rows":
        """Select rows of a matrix without blocks, or one expert's matrix."""
        return Fp8Rows(self.rows[index], self.scales[index], self.block)

    def floats(self) -> torch.Tensor:
        """Return the matrix in float32: FP8 elements multiplied by their scales."""
        if self.block is None:
            return self.rows.float() * self.scales[..., None]
        height, width = self.block
        scales = self.scales.repeat_interleave(height, -2).repeat_interleave(width, -1)
        return self.rows.float() * scales[..., : self.rows.shape[-2], : self.rows.shape[-1]]


@dataclass(frozen=True, slots=True)
class PartlyFp8:
    """Weight of fused linears, of which the first are FP8 and the others floats.

    first [rows, width]: the FP8 linears.
    others [rows, width]: the linears in floats.
    """

    first: Fp8Rows
    others: torch.Tensor


@dataclass(frozen=True, slots=True)
class Activations:
    """Input of linear layers, both unrounded and rounded to FP8.

    rows [tokens, width]: unrounded.
    fp8: the same tokens, rounded to FP8.
    """

    rows: torch.Tensor
    fp8: Fp8Rows

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return self.rows.device


@by_device
def linear(
    x: torch.Tensor,
    weight: Fp8Rows,
    bias: torch.Tensor | None = None,
    rounded: Fp8Rows | None = None,
) -> torch.Tensor:
    """Compute Q(x)·Wᵀ + b, where Q(x) is x rounded to FP8, each token with its own scale.

    x [tokens, d_in], each token contiguous
    weight: W [d_out, d_in]
    bias: b [d_out]
    rounded: Q(x), if it has been computed before
    → [tokens, d_out] like x

    Sums are float32.
    """
    tokens = rounded or quantize_rows(x)
    x_rows, x_scales = tokens.rows.float(), tokens.scales[:, None]
    if weight.block is None:
        y = F.linear(x_rows, weight.rows.float()) * x_scales * weight.scales
    else:
        y = F.linear(x_rows, weight.floats()) * x_scales
    return (y if bias is None else y + bias.float()).to(x.dtype)


def kernel_arguments(
    weight: torch.Tensor | Fp8Rows,
) -> tuple[torch.Tensor, torch.Tensor | None, int, int]:
    """Return the operands by which kernels read a weight in floats or FP8.

    The operands are the weight's elements, its scales (None for floats), and the height and width
    of the blocks that have scales. The width is 0 if rows have scales, or if the weight has none.
    """
    if isinstance(weight, Fp8Rows):
        return weight.rows, weight.scales, *(weight.block or (1, 0))
    return weight, None, 1, 0


def rounds(weight: object, tokens: int) -> bool:
    """Return whether a linear with this weight rounds an input of this many tokens to FP8.

    A single token stays unrounded (fused.linear).
    """
    return isinstance(weight, Fp8Rows | PartlyFp8) and tokens > 1


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise SettingsError unless the device supports FP8 products with results of this dtype."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_WITH_FP8:
        raise SettingsError(
            f"FP8 weights need a GPU of compute capability 8.9 or above (Ada or Hopper), {device} "
            f"has {'.'.join(map(str, capability))}: want a checkpoint of floats, weight_dtype=auto"
        )
    if dtype is not torch.bfloat16:  # the only result dtype of torch's product on Ada too
        raise SettingsError(f"dtype={dtype}: FP8 weights want bfloat16 on a GPU")


def quantize_rows(x: torch.Tensor) -> Fp8Rows:
    """Round x [rows, width] to FP8; a row's largest element becomes the largest FP8 number."""
    values = x.float()
    scales = (values.abs().amax(dim=1) * (1.0 / LARGEST)).clamp(min=LEAST_SCALE)
    return Fp8Rows((values / scales[:, None]).to(DTYPE), scales)


def quantize_weight(weight: torch.Tensor) -> Fp8Rows:
    """Round a weight [d_out, d_in] to FP8 on its own device, with a scale for each row.

    Some rows are rounded at a time to save memory.
    """
    out = Fp8Rows(
        torch.empty_like(weight, dtype=DTYPE),
        torch.empty(len(weight), dtype=torch.float32, device=weight.device),
    )
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        rounded = quantize_rows(weight[part])
        out.rows[part], out.scales[part] = rounded.rows, rounded.scales
    return out
