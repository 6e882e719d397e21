"""The LoRA operators: y += x @ A.T @ B.T with each token's own adapter.

`reference` is the equation in torch and runs on the CPU; `shrink` and `expand` are Triton kernels
with the same signatures.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch

from lorikeet_engine.kernels.lora import reference
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights, Segments

__all__ = ["LoraGroup", "LoraWeights", "Segments", "add_lora"]


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: LoraWeights,
    segments: Segments,
    layer: int,
    group: LoraGroup,
) -> None:
    """y[t] += B(t) @ A(t) @ x[t] for every linear of the group, in place.

    x [tokens, d_in]; y [tokens, sum(d_outs)], the outputs of the group's linears side by side.
    Tokens outside every segment keep their y. Raises ShapeError.
    """
    shrink, expand = _operators(y.device.type)
    v = shrink(x, weights, segments, layer, group)  # [tokens, slices, max_rank]
    expand(v, y, weights, segments, layer, group)


@cache
def _operators(device_type: str) -> tuple[Any, Any]:
    if device_type != "cuda":
        return reference.shrink, reference.expand
    return _triton("shrink").shrink, _triton("expand").expand


def _triton(name: str) -> ModuleType:
    # Imported only here: a machine without a GPU may have no Triton.
    from importlib import import_module

    return import_module(f"lorikeet_engine.kernels.lora.{name}")
