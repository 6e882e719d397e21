"""The LoRA operators: `linear` is the one linear layer, with what each token's adapter adds.

`types` are its operands, `reference` the equation in torch, `shrink` and `expand` the Triton
kernels, `tiles` and `tuning` what these are launched with.
"""

from lorikeet_engine.kernels.lora.linear import (
    begin_step,
    linear_with_lora,
    linear_with_lora_before_silu,
)
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
