"""Models of transformers that compute as FP8 linears do: rounded weights, and rounded inputs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F

from lorikeet_engine.kernels.fp8.reference import quantize_rows, quantize_weight


class RoundedLinear(torch.nn.Linear):
    """A linear whose input is rounded to FP8, token by token; its weight is what it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = quantize_rows(x.flatten(0, -2))
        y = F.linear(tokens.rows.float() * tokens.scales[:, None], self.weight, self.bias)
        return y.view(*x.shape[:-1], -1)


def rounded_model(folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> Any:
    """A checkpoint of floats with these linears' weights, by name; without, with rounded ones."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    round_linears(model)
    for name, weight in (weights or {}).items():
        if "_proj" in name:
            model.get_parameter(name).data = weight
    return model


def round_linears(model: torch.nn.Module) -> None:
    """Make the layers' linears, also under PEFT's, compute as FP8 linears do."""
    for name, linear in model.named_modules():
        if name.removesuffix(".base_layer").endswith("_proj") and type(linear) is torch.nn.Linear:
            linear.__class__ = RoundedLinear
            linear.weight.data = rounded(linear.weight.data)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The floats that a weight's FP8 numbers stand for."""
    quantized = quantize_weight(weight)
    return quantized.rows.float() * quantized.scales[:, None]
