"""The small layers of a decoder: RMS norm, rotary embedding, and linears with LoRA."""

import math

import torch

from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.kernels.lora import (
    LoraDelta,
    LoraGroup,
    LoraStep,
    UnexpandedDelta,
    linear_with_lora,
    linear_with_lora_before_silu,
)
from lorikeet_engine.kernels.pointwise import add_rms_norm
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import Llama3RopeScaling, RopeConfig


class RmsNorm:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension; the inside is float32."""

    def __init__(self, checkpoint: Checkpoint, name: str, width: int, eps: float) -> None:
        self.eps = eps
        self.weight = checkpoint.read([f"{name}.weight"], [width])

    def add_and_norm(
        self, x: torch.Tensor, delta: torch.Tensor, lora: LoraDelta | None
    ) -> torch.Tensor:
        """Add delta and lora to x in place, then normalise each row; all [tokens, width]."""
        return add_rms_norm(x, delta, self.weight, self.eps, lora)


class RotaryEmbedding:
    """Cosines and sines of every position, [positions, head_dim / 2] float32."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device
    ) -> None:
        frequencies = _frequencies(rope, head_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, head_dim / 2] float32 of positions [tokens] int64."""
        return self._cos[positions], self._sin[positions]


def _frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents  # [head_dim / 2]
    return frequencies if rope.scaling is None else _stretch(frequencies, rope.scaling)


def _stretch(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    turns = scaling.original_context / (2 * math.pi / frequencies)  # in the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 0: slowed by factor, 1: as it was
    # in the order of the reference: a rounding here grows with the position
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies


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
        return linear_with_lora(x, self.weight, self.bias, lora, self.layer, self.group)

    def before_silu(
        self, x: torch.Tensor, lora: LoraStep | None
    ) -> tuple[torch.Tensor, LoraDelta | UnexpandedDelta | None]:
        """Do what __call__ does, for silu_and_mul alone to read: the delta may be unexpanded."""
        return linear_with_lora_before_silu(x, self.weight, self.bias, lora, self.layer, self.group)
