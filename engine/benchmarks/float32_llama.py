"""Llama's forward pass in float32 by torch's own operators: what a rounded model is held against.

Nothing of the engine computes here. Weights are read one linear at a time, as a layer is reached.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.rotary import RotaryEmbeddings


class Float32Llama:
    """A checkpoint's model with an adapter whose scaling each sequence has for itself.

    adapter: its tensors, as PEFT names them, for every linear of the layers.
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, adapter: Mapping[str, torch.Tensor]
    ) -> None:
        assert config.shape.family == "llama", f"{config.shape.family}: want llama"
        self._config, self._checkpoint, self._adapter = config, checkpoint, adapter
        self._head = self._read("lm_head", config.vocab_size, config.shape.hidden)
        self.device = checkpoint.device
        self._rotary = RotaryEmbeddings(config.ropes, config.max_context, checkpoint.device)

    @torch.inference_mode()
    def hidden(self, tokens: torch.Tensor, scalings: torch.Tensor) -> torch.Tensor:
        """What `logits` reads, [sequences, length, hidden], of tokens [sequences, length].

        scalings [sequences]: of the adapter; 0 for the base model alone.
        """
        shape, scale = self._config.shape, scalings.float()[:, None, None]
        embeddings = self._read("model.embed_tokens", self._config.vocab_size, shape.hidden)
        x = F.embedding(tokens, embeddings)
        del embeddings
        for layer in range(shape.layers):
            x += self._attention(layer, self._norm(x), scale)
            x += self._mlp(layer, self._norm(x), scale)
        return self._norm(x)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] of rows of `hidden`."""
        return F.linear(hidden, self._head)

    def _attention(self, layer: int, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        shape = self._config.shape
        positions = torch.arange(x.shape[1], device=x.device)
        turns = self._rotary.at(positions)[self._config.ropes[layer]]
        q, k, v = (
            self._linear(layer, name, x, scale).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = _turned(q, turns.cos, turns.sin), _turned(k, turns.cos, turns.sin)
        k, v = (part.repeat_interleave(shape.heads // shape.kv_heads, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._linear(layer, "o_proj", mixed.transpose(1, 2).flatten(2), scale)

    def _mlp(self, layer: int, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        gate = F.silu(self._linear(layer, "gate_proj", x, scale))
        return self._linear(
            layer, "down_proj", gate * self._linear(layer, "up_proj", x, scale), scale
        )

    def _linear(self, layer: int, name: str, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        shape = self._config.shape
        index = shape.index(name)
        path, (d_in, d_out) = shape.linears[index].path(layer), shape.dims(index)
        a, b = (self._adapter[f"base_model.model.{path}.lora_{part}.weight"].to(x) for part in "AB")
        return F.linear(x, self._read(path, d_out, d_in)) + F.linear(F.linear(x, a), b) * scale

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """A norm whose weight is 1, as all of a RandomCheckpoint's are."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._config.norm_eps)

    def _read(self, path: str, d_out: int, d_in: int) -> torch.Tensor:
        return self._checkpoint.read([f"{path}.weight"], [d_out], d_in).float()


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [..., positions, head_dim] turned, each pair made of a number of either half."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
