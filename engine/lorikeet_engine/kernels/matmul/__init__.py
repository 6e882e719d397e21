"""The base model's matrix products: cuBLAS, and a GEMV kernel of our own where that is slow."""

from importlib import import_module

import torch
from torch.nn import functional as F

__all__ = ["linear"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Gives x·Wᵀ + b: x [tokens, d_in], weight [d_out, d_in], bias [d_out] → [tokens, d_out]."""
    if x.is_cuda and len(x) == 1 and x.dtype.itemsize == 2:
        # Triton is imported only here: a machine without a GPU may have none.
        gemv = import_module("lorikeet_engine.kernels.matmul.gemv")
        y: torch.Tensor = gemv.gemv(x, weight, bias)
        return y
    return F.linear(x, weight, bias)
