"""Dense MLP of a layer; experts.py has mixtures of experts."""

import torch

from lorikeet_engine.kernels import fp8
from lorikeet_engine.kernels.lora.linear import Inputs, linear_act_and_mul, rows_of
from lorikeet_engine.kernels.lora.types import LoraDelta, LoraStep
from lorikeet_engine.kernels.pointwise import act_and_mul, squared_relu
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.linears import LoraLinear
from lorikeet_engine.models.norms import Product, read_norm_weight, summed_product
from lorikeet_engine.parallel.rank_group import RankGroup


class Mlp:
    """MLP y = down(silu(gate(x)) · up(x)), or with GELU instead of SiLU, divided among ranks.

    By the config, MLPs without gate compute y = down(max(up(x), 0)²).
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        layer: int,
        ranks: RankGroup | None,
        output_norm: str | None,
        *,
        shared: bool = False,
    ) -> None:
        """Read this rank's part of a layer's MLP.

        Raises ModelError if a tensor is missing or malformed.

        layer: index of the layer.
        ranks: processes that share the layers; None: this process alone.
        output_norm: tensor name of the weight of a norm that the output passes; None: no norm.
        shared: whether to read the expert that all tokens of a mixture share.
        """
        shape, bias, part = config.shape, config.mlp_bias and not shared, "shared_" * shared
        if shape.kv_owner(layer) != layer:
            part = "wide_"
        self.squared_relu, self.gelu = config.squared_relu, config.gelu
        first = f"{part}up" if self.squared_relu else f"{part}gate_up"
        self.gate_up = LoraLinear(checkpoint, shape, layer, first, bias=bias)
        self.down = LoraLinear(checkpoint, shape, layer, f"{part}down", bias=bias)
        self._ranks = ranks
        self.output_weight = read_norm_weight(config, checkpoint, output_norm)

    def rounds(self, tokens: int) -> bool:
        """Return whether the MLP's products round an input of this many tokens to FP8."""
        return fp8.rounds(self.gate_up.weight, tokens)

    def __call__(self, x: Inputs, lora: LoraStep | None) -> Product:
        """Compute the MLP of hidden states x [tokens, hidden] → Product [tokens, hidden].

        lora: LoRA work of the forward pass; None: no adapter.
        """
        return summed_product(*self.partial(x, lora), self.output_weight, self._ranks)

    def partial(self, x: Inputs, lora: LoraStep | None) -> tuple[torch.Tensor, LoraDelta | None]:
        """Compute this rank's part of the MLP, and the LoRA delta to add to it.

        x: hidden states [tokens, hidden].
        lora: LoRA work of the forward pass; None: no adapter.
        """
        return self.down(self._activated(x, lora), lora)

    def _activated(self, x: Inputs, lora: LoraStep | None) -> Inputs:
        first, gelu, rounds = self.gate_up, self.gelu, fp8.rounds(self.down.weight, len(rows_of(x)))
        if self.squared_relu:
            return squared_relu(*first(x, lora), fp8=rounds)
        if lora is None and not rounds:
            return linear_act_and_mul(x, first.weight, first.bias, gelu=gelu)
        return act_and_mul(*first.before_act(x, lora), gelu=gelu, fp8=rounds)
