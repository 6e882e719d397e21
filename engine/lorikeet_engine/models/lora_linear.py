"""The one kind of linear layer: the base model's product, and each token's adapter on top."""

from collections.abc import Sequence

import torch

from lorikeet_engine.adapter_format import LINEARS
from lorikeet_engine.kernels.lora import (
    LoraDelta,
    LoraGroup,
    LoraShare,
    LoraStep,
    linear,
    linear_before_gate,
)
from lorikeet_engine.models.weights import Checkpoint


class LoraLinear:
    """y = x·Wᵀ + b, and + B(t)·A(t)·x for a token t whose sequence has an adapter.

    Projections of one input are fused: their weights stand on top of one another in
    weight [sum(d_outs), d_in], their outputs side by side in y.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: int,
        block: str,
        names: Sequence[str],
        d_in: int,
        d_outs: Sequence[int],
        *,
        bias: bool,
    ) -> None:
        """Read projections `names` of model.layers.{layer}.{block}; raises ModelError."""
        self.layer = layer
        self.group = LoraGroup(tuple(LINEARS.index(name) for name in names), d_in, tuple(d_outs))
        paths = [f"model.layers.{layer}.{block}.{name}" for name in names]
        self.weight = checkpoint.read([f"{path}.weight" for path in paths], d_outs, d_in)
        self.bias = checkpoint.read([f"{path}.bias" for path in paths], d_outs) if bias else None

    def __call__(
        self, x: torch.Tensor, lora: LoraStep | None
    ) -> tuple[torch.Tensor, LoraDelta | None]:
        """Y [tokens, sum(d_outs)] of x [tokens, d_in], and what is still to be added to it."""
        return linear(x, self.weight, self.bias, lora, self.layer, self.group)

    def before_gate(
        self, x: torch.Tensor, lora: LoraStep | None
    ) -> tuple[torch.Tensor, LoraDelta | LoraShare | None]:
        """The same, where a gate reads both next."""
        return linear_before_gate(x, self.weight, self.bias, lora, self.layer, self.group)
