"""Multi-head latent attention of a layer (arXiv 2405.04434, section 2.1).

kernels/latents defines the computation. Each rank has the projections to latents whole, and those
from latents for some heads.
"""

import torch

from lorikeet_engine.kernels.attention.protocol import AttentionBackend
from lorikeet_engine.kernels.fp8_kv import FP8_KV, KvScales
from lorikeet_engine.kernels.latents import (
    AbsorbedWeight,
    LatentNorms,
    absorb_queries,
    expand_outputs,
    store_latents,
)
from lorikeet_engine.kernels.lora.linear import Inputs
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraStep
from lorikeet_engine.models.batch import Batch
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.kv_scales import read_kv_scales
from lorikeet_engine.models.linears import LoraLinear, by_heads
from lorikeet_engine.models.norms import Product, summed_product
from lorikeet_engine.models.rotary import Turns
from lorikeet_engine.parallel.rank_group import RankGroup

_EPS = 1e-6
"""Addend of the mean squares of latents, whatever rms_norm_eps says, as in transformers."""


class LatentAttention:
    """Multi-head latent attention (DeepSeek's MLA) of a layer: the KV cache holds one latent vector
    for each token. Each rank computes some heads.
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, layer: int, ranks: RankGroup | None
    ) -> None:
        """Read this rank's part of a layer's attention.

        Raises ModelError if a tensor is missing or malformed.

        layer: index of the layer.
        ranks: processes that share the layers; None: this process alone.
        """
        shape, sizes = config.shape, config.shape.latents
        assert sizes is not None
        self._ranks, self._head_dim = ranks, shape.head_dim
        rope, place = config.ropes[layer], config.kv_groups.places[layer]
        assert rope is not None
        assert place is not None
        self.rope, self._place = rope, place
        self.inputs = LoraLinear(checkpoint, shape, layer, "latents", bias=False)
        group = "q_b" if sizes.query_rank else "queries"
        self._queries = LoraLinear(checkpoint, shape, layer, group, bias=False)
        self._o = LoraLinear(checkpoint, shape, layer, "o", bias=False)
        path = shape.linears[self.inputs.group.linears[0]].path(layer).rpartition(".")[0]
        queries, keys = (
            checkpoint.read([f"{path}.{name}_a_layernorm.weight"], [rank]) if rank else None
            for name, rank in (("q", sizes.query_rank), ("kv", sizes.kv_rank))
        )
        assert keys is not None
        self._norms = LatentNorms(queries, keys, _EPS)
        scale = read_kv_scales(checkpoint, path).key
        self._kv_scales = KvScales(scale, scale)
        self._weight = _absorbed(checkpoint, config, layer)

    def __call__(
        self,
        x: Inputs,
        turns: Turns,
        layers_kv: tuple[torch.Tensor, ...],
        kv_slots: tuple[torch.Tensor, ...],
        batch: Batch,
        attention: AttentionBackend,
        lora: LoraStep | None,
    ) -> Product:
        """Compute attention of x [tokens, hidden], and write its latents to the KV cache.

        turns: rotary angles of the batch's positions.
        layers_kv: KV cache, one tensor for each piece of its pages (KvPlace.layer).
        kv_slots: for each group of layers, page · page_size + offset of each token's latent.
        attention: back end whose `plan` was called with the batch.
        lora: LoRA work of the forward pass; None: no adapter.
        → Product [tokens, hidden]
        """
        layer_kv, group = layers_kv[self._place.layer], self._place.group
        scales = self._kv_scales if layer_kv.dtype == FP8_KV else None
        y, delta = self.inputs(x, lora)
        cos, sin, interleaved = turns.cos, turns.sin, self.rope.interleaved
        queries = store_latents(
            y, cos, sin, layer_kv, kv_slots[group], self._norms, delta, scales,
            interleaved=interleaved,
        )  # fmt: skip
        read = x if self._norms.queries is None else queries
        q, delta = by_heads(*self._queries(read, lora), self._head_dim)
        absorbed = absorb_queries(q, cos, sin, self._weight, delta, lora, interleaved=interleaved)
        mixed = attention.attend(absorbed, layer_kv, batch, scales, None, group)
        outputs = expand_outputs(mixed, self._weight, lora)
        return summed_product(*self._o(outputs.flatten(1), lora), None, self._ranks)


def _absorbed(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> AbsorbedWeight:
    """Read this rank's heads of kv_b_proj as floats, since queries and outputs are multiplied by
    parts of it, never by the whole linear.
    """
    shape, sizes = config.shape, config.shape.latents
    assert sizes is not None
    (linear,) = shape.groups["kv_b"]
    kept = checkpoint.shard.ranges(shape)[linear]
    (rows,) = kept.outputs
    d_in, d_out = shape.dims(linear)
    name = f"{shape.linears[linear].path(layer)}.weight"
    weight = checkpoint.read_parts([name], [Cut((d_out, d_in), rows)])
    width = sizes.plain + sizes.values
    group = LoraGroup((linear,), d_in, (kept.d_out,))
    return AbsorbedWeight(weight.view(-1, width, d_in), sizes.plain, layer, group)
