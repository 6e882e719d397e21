"""The LoRA operators: a product of the base model and, for each token, its own adapter's shrunk.

`reference` is the equation in torch and the path on the CPU, where y = x·Wᵀ + B·A·x is computed at
once. On CUDA the Triton kernels `shrink` and `expand` compute that delta on a stream of their
own (`side_stream`), and the kernel of `kernels/pointwise/fused.py` that reads the product next
adds it.
"""

from importlib import import_module
from typing import Any

import torch

from lorikeet_engine.kernels import matmul
from lorikeet_engine.kernels.lora.reference import add_lora
from lorikeet_engine.kernels.lora.types import (
    LoraDelta,
    LoraGroup,
    LoraStep,
    LoraWeights,
    Segments,
    UnexpandedDelta,
)

__all__ = [
    "LoraDelta",
    "LoraGroup",
    "LoraStep",
    "LoraWeights",
    "Segments",
    "UnexpandedDelta",
    "add_lora",
    "begin_step",
    "linear_with_lora",
    "linear_with_lora_before_silu",
]


def begin_step(weights: LoraWeights, segments: Segments, tokens: int) -> LoraStep:
    """The LoRA work of a forward pass of `tokens` tokens; on CUDA one launch, before all others."""
    tiles = None
    if weights.arena.device.type == "cuda":
        tiles = _cuda("tiles").list_tiles(segments, tokens)
    return LoraStep(weights, segments, tiles)


def linear_with_lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    step: LoraStep | None,
    layer: int,
    group: LoraGroup,
) -> tuple[torch.Tensor, LoraDelta | None]:
    """Gives y = x·Wᵀ + b and what the adapters add to it; None: it is in y, or there is nothing.

    x [tokens, d_in], weight [sum(d_outs), d_in] → y and delta.rows [tokens, sum(d_outs)]. delta
    is rounded to x's dtype once more than a sum in float32 would be. Raises ShapeError.
    """
    if step is not None and step.tiles is not None:
        delta = x.new_empty((len(x), sum(group.d_outs)))
        y, _ = _cuda("side_stream").linear_and_lora(x, weight, bias, step, layer, group, delta)
        return y, LoraDelta(delta, step.tiles.tokens)
    y = matmul.linear(x, weight, bias)
    if step is not None:
        add_lora(y, x, step.weights, step.segments, layer, group)
    return y, None


def linear_with_lora_before_silu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    step: LoraStep | None,
    layer: int,
    group: LoraGroup,
) -> tuple[torch.Tensor, LoraDelta | UnexpandedDelta | None]:
    """Do what linear_with_lora does, but leave expanding to silu_and_mul in a prefill on CUDA.

    The delta of one linear that stores gate and up as one is expanded here: the kernel reads two.
    """
    fits = step is not None and step.tiles is not None and step.tiles.silu_expands
    if not fits or len(group.linears) != 2:
        return linear_with_lora(x, weight, bias, step, layer, group)
    pair: tuple[torch.Tensor, UnexpandedDelta] = _cuda("side_stream").linear_and_lora(
        x, weight, bias, step, layer, group
    )
    return pair


def _cuda(name: str) -> Any:
    # Imported only here: a machine without a GPU may have no Triton.
    return import_module(f"lorikeet_engine.kernels.lora.{name}")
