"""Linear layers with FP8 weights in pure torch: CPU path, and reference of the CUDA kernels."""

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.fp8 import DTYPE, LARGEST, LEAST_SCALE, Fp8Rows

_ROWS_AT_ONCE = 1024  # bounds the float32 copies beside a weight


def linear(
    x: torch.Tensor,
    weight: Fp8Rows,
    bias: torch.Tensor | None = None,
    rounded: Fp8Rows | None = None,
) -> torch.Tensor:
    """Compute x·Wᵀ + b of x rounded to FP8, in float32: see kernels.fp8.

    rounded: x rounded to FP8, if it has been computed before; None: it is computed here.
    """
    tokens = rounded or quantize_rows(x)
    x_rows, x_scales = tokens.rows.float(), tokens.scales[:, None]
    if weight.block is None:
        y = F.linear(x_rows, weight.rows.float()) * x_scales * weight.scales
    else:
        y = F.linear(x_rows, weight.floats()) * x_scales
    return (y if bias is None else y + bias.float()).to(x.dtype)


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
