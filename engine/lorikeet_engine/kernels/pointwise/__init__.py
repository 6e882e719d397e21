"""What stands between a decoder's products: norms, rotary embedding, the gate.

`reference` is the equation in torch and runs on the CPU; `fused` holds Triton kernels with the
same signatures.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

__all__ = ["add_norm", "gate", "rotate"]


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add delta to x in place; returns x / sqrt(mean(x²) + eps) · weight, in float32 inside.

    x, delta [tokens, width], dense; weight [width] → like x.
    """
    y: torch.Tensor = _operators(x.device.type).add_norm(x, delta, weight, eps)
    return y


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its position's angle, in float32, in place.

    x [tokens, heads, head_dim], dense in a token; cos, sin [tokens, head_dim / 2] float32.
    """
    _operators(x.device.type).rotate(x, cos, sin)


def gate(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :width]) · x[:, width:] of x [tokens, 2 · width], dense → [tokens, width]."""
    y: torch.Tensor = _operators(x.device.type).gate(x)
    return y


@cache
def _operators(device_type: str) -> ModuleType:
    # Triton is imported only here: a machine without a GPU may have none.
    name = "fused" if device_type == "cuda" else "reference"
    return import_module(f"lorikeet_engine.kernels.pointwise.{name}")
