"""The norms of a decoder: of the hidden states, and of each head's query and key."""

import torch

from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise import QkNorm, add_rms_norm
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig


class RmsNorm:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension; the inside is float32."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, name: str) -> None:
        self.eps = config.norm_eps
        self.multiplier = config.residual_multiplier
        self.weight = checkpoint.read([f"{name}.weight"], [config.shape.hidden])

    def add_and_norm(
        self, x: torch.Tensor, delta: torch.Tensor, lora: LoraDelta | None
    ) -> torch.Tensor:
        """Add delta and lora, times the multiplier, to x in place, then normalise each row.

        All [tokens, width].
        """
        return add_rms_norm(x, delta, self.weight, self.eps, lora, self.multiplier)


def read_qk_norm(config: ModelConfig, checkpoint: Checkpoint, layer: int) -> QkNorm:
    """A layer's norm of queries and keys. Raises ModelError."""
    path, width = f"model.layers.{layer}.self_attn", [config.shape.head_dim]
    query, key = (checkpoint.read([f"{path}.{name}_norm.weight"], width) for name in "qk")
    return QkNorm(query, key, config.norm_eps)
