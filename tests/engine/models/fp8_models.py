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
        rounded, scales = quantize_rows(x.flatten(0, -2))
        y = F.linear(rounded.float() * scales[:, None], self.weight, self.bias)
        return y.view(*x.shape[:-1], -1)


def rounded_model(folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> Any:
    """A checkpoint of floats with these linears' weights, by name; without, with rounded ones."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for name, linear in model.named_modules():
        if name.endswith("_proj"):
            linear.__class__ = RoundedLinear
            given = None if weights is None else weights[f"{name}.weight"]
            linear.weight.data = rounded(linear.weight.data) if given is None else given
    return model


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The floats that a weight's FP8 numbers stand for."""
    quantized = quantize_weight(weight)
    return quantized.rows.float() * quantized.scales[:, None]
