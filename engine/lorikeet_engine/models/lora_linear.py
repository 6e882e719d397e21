"""The one kind of linear layer: the base model's product, and each token's adapter on top."""

import torch

from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.kernels.lora import (
    LoraDelta,
    LoraGroup,
    LoraStep,
    UnexpandedDelta,
    linear,
    linear_before_silu,
)
from lorikeet_engine.models.checkpoint import Checkpoint


class LoraLinear:
    """y = x·Wᵀ + b, and + B(t)·A(t)·x for a token t whose sequence has an adapter.

    Linears of one group are fused: their weights stand on top of one another in
    weight [sum(d_outs), d_in], their outputs side by side in y.
    """

    def __init__(
        self, checkpoint: Checkpoint, shape: BaseShape, layer: int, group: str, *, bias: bool
    ) -> None:
        """Read the linears of a group of the shape's; raises ModelError."""
        linears = shape.groups[group]
        assert all(shape.linears[n].experts == 1 for n in linears), "one matrix for all tokens"
        d_in, d_outs = shape.dims(linears[0])[0], tuple(shape.dims(n)[1] for n in linears)
        self.layer = layer
        self.group = LoraGroup(linears, d_in, d_outs)
        paths = [shape.linears[n].path(layer) for n in linears]
        self.weight = checkpoint.read([f"{path}.weight" for path in paths], d_outs, d_in)
        self.bias = checkpoint.read([f"{path}.bias" for path in paths], d_outs) if bias else None

    def __call__(
        self, x: torch.Tensor, lora: LoraStep | None
    ) -> tuple[torch.Tensor, LoraDelta | None]:
        """Return y [tokens, sum(d_outs)] of x [tokens, d_in], and what is yet to be added to it."""
        return linear(x, self.weight, self.bias, lora, self.layer, self.group)

    def before_silu(
        self, x: torch.Tensor, lora: LoraStep | None
    ) -> tuple[torch.Tensor, LoraDelta | UnexpandedDelta | None]:
        """Do what __call__ does, for silu_and_mul alone to read: the delta may be unexpanded."""
        return linear_before_silu(x, self.weight, self.bias, lora, self.layer, self.group)
