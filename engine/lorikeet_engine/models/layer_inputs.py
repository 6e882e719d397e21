"""Inputs of each layer beside hidden states, as in Gemma 4 E2B and E4B: per-layer embeddings.

Token t's input of layer l, with e the token's embedding:

    i[t, l] = (norm(W·e / √hidden)[l] + table[t, l] · √width) / √2

A layer ends with x += norm(P·(gelu(G·x) · i[t, l])). W is per_layer_model_projection, table is
embed_tokens_per_layer, G and P are per_layer_input_gate and per_layer_projection. Every rank
computes all of it.
"""

import math

import torch
from torch.nn import functional as F

from lorikeet_engine.adapter_format.families import LAYER_INPUTS
from lorikeet_engine.kernels.lora.types import LoraDelta, LoraStep
from lorikeet_engine.kernels.pointwise import add_delta, rms_norm
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.linears import LoraLinear
from lorikeet_engine.models.norms import Product, RmsNorm, read_norm_weight


class LayerInputs:
    """Computes a vector for each layer and token, the layer's own input, from token ids and
    embeddings (per-layer embeddings of Gemma 4 E2B and E4B).
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        """Read the embeddings for each layer (only the vocabulary's rows), a projection and a norm.

        Raises ModelError if a tensor is missing or malformed.
        """
        shape, self._eps = config.shape, config.norm_eps
        self._shape = shape.layers, shape.layer_input
        width = math.prod(self._shape)
        cut = Cut((config.layer_input_rows, width), range(config.vocab_size), range(width))
        self.table = checkpoint.read_parts(["model.embed_tokens_per_layer.weight"], [cut])
        outer, name = shape.outer_layer, LAYER_INPUTS.name
        self.projection = LoraLinear(checkpoint, shape, outer, name, bias=False)
        path = "model.per_layer_projection_norm.weight"
        self.weight = checkpoint.read([path], [shape.layer_input])
        self._scale = 1 / math.sqrt(shape.hidden)
        # rounded to the dtype, as transformers does
        root = math.sqrt(shape.layer_input)
        self._multiplier = torch.tensor(root, dtype=checkpoint.dtype).item()

    def __call__(
        self, token_ids: torch.Tensor, x: torch.Tensor, lora: LoraStep | None
    ) -> torch.Tensor:
        """Compute each layer's own input for a step's tokens → [tokens, layers, width].

        token_ids [tokens] int64
        x [tokens, hidden]: embeddings of the tokens
        lora: LoRA work of the forward pass; None: no adapter.
        """
        projected = _complete(*self.projection(x, lora)).mul_(self._scale)
        rows = projected.view(-1, self._shape[1])
        inputs = F.embedding(token_ids, self.table).mul_(self._multiplier)
        inputs.add_(rms_norm(rows, self.weight, self._eps).view_as(inputs)).mul_(2**-0.5)
        return inputs.view(-1, *self._shape)


class OwnInput:
    """Last part of a layer: computes gates from the hidden states, multiplies the layer's own input
    (LayerInputs) by them, and projects the product to be added to the hidden states.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layer: int) -> None:
        """Read a layer's gate, projection and norm.

        Raises ModelError if a tensor is missing or malformed.

        layer: index of the layer.
        """
        shape, self._layer, self._gelu = config.shape, layer, config.gelu
        self._before = RmsNorm(config, checkpoint, None)
        self.gate = LoraLinear(checkpoint, shape, layer, "layer_input_gate", bias=False)
        self.projection = LoraLinear(checkpoint, shape, layer, "layer_input_out", bias=False)
        path = f"model.layers.{layer}.post_per_layer_input_norm"
        self.output_weight = read_norm_weight(config, checkpoint, path)

    def __call__(
        self, x: torch.Tensor, delta: Product, inputs: torch.Tensor, lora: LoraStep | None
    ) -> Product:
        """Add delta to x in place, and return this part's output, which the next layer adds →
        Product [tokens, hidden].

        x [tokens, hidden]: hidden states.
        delta: the MLP's output.
        inputs [tokens, layers, width]: own inputs of all layers.
        lora: LoRA work of the forward pass; None: no adapter.
        """
        x = self._before.add_and_norm(x, delta)
        gates = _complete(*self.gate(x, lora))
        gates = F.gelu(gates, approximate="tanh") if self._gelu else F.silu(gates)
        y, of_y = self.projection(gates.mul_(inputs[:, self._layer]), lora)
        return Product(y, of_y, self.output_weight)


def _complete(y: torch.Tensor, lora: LoraDelta | None) -> torch.Tensor:
    """Add a product's LoRA delta to it in place, and return the product."""
    if lora is not None:
        add_delta(y, lora)
    return y
