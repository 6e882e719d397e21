"""The LoRA operators: a product of the base model and, for each token, its own adapter's share.

`reference` is the equation in torch and the path on the CPU, where y = x·Wᵀ + B·A·x is computed at
once. On CUDA Triton kernels, `shrink` and `expand`, compute the adapters' share `beside` the
product, and it is added by whatever reads the product next.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from lorikeet_engine.kernels import product
from lorikeet_engine.kernels.lora.reference import add_lora
from lorikeet_engine.kernels.lora.types import LoraDelta, LoraGroup, LoraWeights, Segments

__all__ = [
    "LoraDelta",
    "LoraGroup",
    "LoraStep",
    "LoraWeights",
    "Segments",
    "add_lora",
    "linear",
]


@dataclass(frozen=True, slots=True)
class LoraStep:
    """The LoRA work of one forward pass; tiles: on CUDA, the kernels' list of it."""

    weights: LoraWeights
    segments: Segments
    tiles: Any

    @classmethod
    def of(cls, weights: LoraWeights, segments: Segments, tokens: int) -> "LoraStep":
        """Of a pass with `tokens` tokens; on CUDA one launch, in front of all the others."""
        tiles = None
        if weights.arena.device.type == "cuda":
            tiles = _cuda("tiles").list_tiles(segments, tokens)
        return cls(weights, segments, tiles)


def linear(
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
        beside = _cuda("beside").linear_beside_lora
        pair: tuple[torch.Tensor, LoraDelta] = beside(
            x, weight, bias, step.weights, step.tiles, layer, group
        )
        return pair
    y = product.linear(x, weight, bias)
    if step is not None:
        add_lora(y, x, step.weights, step.segments, layer, group)
    return y, None


def _cuda(name: str) -> Any:
    # Imported only here: a machine without a GPU may have no Triton.
    return import_module(f"lorikeet_engine.kernels.lora.{name}")
