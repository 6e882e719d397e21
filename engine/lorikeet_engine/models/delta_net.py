"""Gated delta net of a layer (arXiv 2412.06464): linear attention with a state of fixed size.

kernels/delta_net defines the convolution and the delta rule.
"""

from lorikeet_engine.adapter_format.families import Width
from lorikeet_engine.kernels.delta_net import (
    Decay,
    Heads,
    decode_convolution,
    decode_delta_rule,
    prefill_convolution,
    prefill_delta_rule,
)
from lorikeet_engine.kernels.lora.linear import Inputs
from lorikeet_engine.kernels.lora.types import LoraStep
from lorikeet_engine.kernels.pointwise import gated_rms_norm
from lorikeet_engine.models.batch import StateRows
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.linears import LoraLinear, by_heads, columns
from lorikeet_engine.models.norms import Product, summed_product
from lorikeet_engine.models.states import RecurrentStates
from lorikeet_engine.parallel.rank_group import RankGroup


class DeltaNet:
    """Gated delta net of a layer, of which each rank computes some heads.

    y = out_proj(norm(o) · silu(z)), where o is the output of the delta rule. The rule's queries,
    keys and values are in_proj_qkv(x) after a causal convolution over the last tokens.
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, layer: int, ranks: RankGroup | None
    ) -> None:
        """Read this rank's part of a layer's delta net.

        Raises ModelError if a tensor is missing or malformed.

        layer: index of the layer.
        ranks: processes that share the layers; None: this process alone.
        """
        shape, shard = config.shape, checkpoint.shard
        whole, own = shape.recurrent, shard.part_of(shape).recurrent
        assert whole is not None
        assert own is not None
        self.heads = Heads(own.key_heads, own.value_heads, own.key_dim, own.value_dim)
        self.eps, self._ranks = config.norm_eps, ranks
        self.inputs = LoraLinear(checkpoint, shape, layer, "delta_in", bias=False)
        self.out = LoraLinear(checkpoint, shape, layer, "delta_out", bias=False)
        channels = shard.rows((Width.DELTA_KEYS, Width.DELTA_KEYS, Width.DELTA_VALUES), shape)
        (heads,) = shard.rows((Width.DELTA_GATES,), shape)
        each = Cut((whole.value_heads,), heads)
        path = f"model.layers.{layer}.linear_attn"
        self.kernel = checkpoint.read_parts(  # [channels, convolution]
            [f"{path}.conv1d.weight"] * len(channels),
            [Cut((whole.convolved, 1, whole.convolution), rows) for rows in channels],
        ).flatten(1)
        self.decay = Decay(
            checkpoint.read_float32(f"{path}.A_log", each),
            checkpoint.read_float32(f"{path}.dt_bias", each),
        )
        self.norm = checkpoint.read_parts([f"{path}.norm.weight"], [Cut.whole(whole.value_dim)])

    def __call__(
        self, x: Inputs, states: RecurrentStates, rows: StateRows, lora: LoraStep | None
    ) -> Product:
        """Compute the delta net of x [tokens, hidden] → Product [tokens, hidden].

        states: states of this layer; those of the batch's sequences are updated.
        rows: slots and layout of the batch's sequences.
        lora: LoRA work of the forward pass; None: no adapter.
        """
        heads = self.heads
        values, gates = heads.value_heads * heads.value_dim, 2 * heads.value_heads
        parts = columns(*self.inputs(x, lora), sum(heads.widths), values, gates)
        (qkv, lora_qkv), (z, lora_z), (ba, lora_ba) = parts
        memory, matrices, ring = states.inputs, states.matrices, states.ring
        decay, y = self.decay, qkv.new_empty(qkv.shape)
        o = z.new_empty(len(z), heads.value_heads, heads.value_dim)
        if (decodes := rows.decodes) is not None:
            decode_convolution(qkv, self.kernel, memory, decodes, lora_qkv, y)
            decode_delta_rule(y, ba, decay, matrices, decodes, heads, lora_ba, o, ring)
        if (prefills := rows.prefills) is not None:
            prefill_convolution(qkv, self.kernel, memory, prefills, lora_qkv, y)
            prefill_delta_rule(y, ba, decay, matrices, prefills, heads, lora_ba, o, ring)
        gate, lora_z = by_heads(z, lora_z, heads.value_dim)
        gated = gated_rms_norm(o, gate, self.norm, self.eps, lora_z).flatten(1)
        return summed_product(*self.out(gated, lora), None, self._ranks)
