"""Mamba 2 mixer of a layer (arXiv 2405.21060): a state space layer with a state of fixed size.

kernels/mamba defines the scan, kernels/delta_net the convolution before it.
"""

import torch

from lorikeet_engine.adapter_format.families import FAMILIES, Width
from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.delta_net import Heads, decode_convolution, prefill_convolution
from lorikeet_engine.kernels.lora.linear import Inputs
from lorikeet_engine.kernels.lora.types import LoraDelta, LoraStep
from lorikeet_engine.kernels.mamba import Scan, decode_scan, fits_gpu, prefill_scan
from lorikeet_engine.kernels.pointwise import gated_group_norm, gated_mean_squares
from lorikeet_engine.models.batch import StateRows
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.linears import LoraLinear, by_heads, columns
from lorikeet_engine.models.norms import Product, summed_product
from lorikeet_engine.models.states import RecurrentStates
from lorikeet_engine.parallel.rank_group import RankGroup


class Mamba:
    """Mamba 2 mixer of a layer, of which each rank computes some heads.

    y = out_proj(norm(o · silu(z))), where o is the output of the scan, and the norm is that of each
    group of heads. The scan's x, B and C pass a causal convolution over the last tokens; z, x, B, C
    and the time steps dt are parts of in_proj's output.
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, layer: int, ranks: RankGroup | None
    ) -> None:
        """Read this rank's part of a layer's mixer.

        Raises ModelError if a tensor is missing or malformed.

        layer: index of the layer.
        ranks: processes that share the layers; None: this process alone.
        """
        shape, shard = config.shape, checkpoint.shard
        whole, own = shape.recurrent, shard.part_of(shape).recurrent
        assert whole is not None
        assert own is not None
        family = FAMILIES[shape.family].recurrent
        assert family is not None
        self.heads = Heads(own.key_heads, own.value_heads, own.key_dim, own.value_dim)
        if checkpoint.device.type == "cuda" and not fits_gpu(self.heads):
            raise ModelError(
                f"config.json: Mamba 2's states are {own.value_dim} × {own.key_dim}: GPUs have "
                "kernels for multiples of 16 times a power of two of 16 and more",
                field=family.key_dim,
            )
        self.eps, self._ranks = config.norm_eps, ranks
        self.inputs = LoraLinear(checkpoint, shape, layer, "mamba_in", bias=False)
        self.out = LoraLinear(checkpoint, shape, layer, "mamba_out", bias=False)
        linear = shape.linears[self.inputs.group.linears[0]]
        path = linear.path(layer).rpartition(".")[0]
        values, keys = Width.DELTA_VALUES, Width.DELTA_KEYS
        channels, names = shard.rows((values, keys, keys), shape), f"{path}.conv1d"
        count = len(channels)
        self.kernel = checkpoint.read_parts(  # [channels, convolution]
            [f"{names}.weight"] * count,
            [Cut((whole.convolved, 1, whole.convolution), rows) for rows in channels],
        ).flatten(1)
        self.bias: torch.Tensor | None = None
        if config.conv_bias:
            cuts = [Cut((whole.convolved,), rows) for rows in channels]
            self.bias = checkpoint.read_parts([f"{names}.bias"] * count, cuts)
        (heads,) = shard.rows((Width.DELTA_GATES,), shape)
        each = Cut((whole.value_heads,), heads)
        a_log, dt_bias, d = (
            checkpoint.read_float32(f"{path}.{name}", each) for name in ("A_log", "dt_bias", "D")
        )
        self.scan = Scan(a_log, dt_bias, d, config.time_limits)
        (rows,) = shard.rows((values,), shape)
        width = whole.value_heads * whole.value_dim
        self.norm = checkpoint.read_parts([f"{path}.norm.weight"], [Cut((width,), rows)])
        self._groups, self._width = whole.key_heads, min(width // whole.key_heads, len(rows))
        self._first = shard.index * whole.key_heads // shard.world  # of this rank's groups
        self._sharing = shard.world // whole.key_heads  # ranks that share a group; 0: none

    def __call__(
        self, x: Inputs, states: RecurrentStates, rows: StateRows, lora: LoraStep | None
    ) -> Product:
        """Compute the mixer of x [tokens, hidden] → Product [tokens, hidden].

        states: states of this layer; those of the batch's sequences are updated.
        rows: slots and layout of the batch's sequences.
        lora: LoRA work of the forward pass; None: no adapter.
        """
        heads, scan = self.heads, self.scan
        values = heads.value_heads * heads.value_dim
        parts = columns(*self.inputs(x, lora), values, sum(heads.widths), heads.value_heads)
        z, (xbc, lora_xbc), (dt, lora_dt) = parts
        memory, matrices, ring = states.inputs, states.matrices, states.ring
        y, kernel, bias = xbc.new_empty(xbc.shape), self.kernel, self.bias
        o = xbc.new_empty(len(xbc), heads.value_heads, heads.value_dim)
        if (decodes := rows.decodes) is not None:
            decode_convolution(xbc, kernel, memory, decodes, lora_xbc, y, bias)
            decode_scan(y, dt, scan, matrices, decodes, heads, lora_dt, o, ring)
        if (prefills := rows.prefills) is not None:
            prefill_convolution(xbc, kernel, memory, prefills, lora_xbc, y, bias)
            prefill_scan(y, dt, scan, matrices, prefills, heads, lora_dt, o, ring)
        return summed_product(*self.out(self._normed(o.flatten(1), *z), lora), None, self._ranks)

    def _normed(self, o: torch.Tensor, z: torch.Tensor, lora: LoraDelta | None) -> torch.Tensor:
        """Return the group norms of o · silu(z), all [tokens, heads · head_dim].

        Ranks that share a group add up the mean squares of their parts.

        lora: LoRA delta of z; None: no adapter.
        """
        o = o.view(len(o), -1, self._width)
        gate, lora = by_heads(z, lora, self._width)
        means = None
        if self._sharing > 1:
            assert self._ranks is not None
            own = gated_mean_squares(o, gate, lora) / self._sharing
            # 16 bytes a token or multiples, which all ways to sum over ranks support
            every = own.new_zeros(len(o), -(-self._groups // 4) * 4)
            every[:, self._first : self._first + 1] = own
            self._ranks.sums.all_reduce(every)
            means = every[:, self._first : self._first + 1].contiguous()
        return gated_group_norm(o, gate, self.norm, self.eps, lora, means).flatten(1)
