"""Linear layers with weights of 4 bits in pure torch: CPU path, and reference of CUDA's kernels."""

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.w4a16 import PackedWeight


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x·Wᵀ + b (kernels.w4a16.linear) as a float32 product of the decoded weight."""
    return F.linear(x.float(), weight.floats(), None if bias is None else bias.float()).to(x.dtype)
