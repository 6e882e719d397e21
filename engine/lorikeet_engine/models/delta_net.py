"""Gated delta net of a layer (arXiv 2412.06464): attention over a state of one size.

A sequence's state, of a layer, is the last inputs of a convolution, and for each value head a
matrix S [key_dim, value_dim], which each token updates by the gated delta rule:

    S ← exp(g) · S + k · (β · (v − exp(g) · Sᵀk))ᵀ        o = Sᵀq
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.lora.linear import Inputs
from lorikeet_engine.kernels.lora.types import LoraStep
from lorikeet_engine.kernels.pointwise import add_delta
from lorikeet_engine.models.batch import StateRows
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.linears import LoraLinear
from lorikeet_engine.models.norms import Product, summed_product
from lorikeet_engine.parallel.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """States of sequences in delta nets, by slot.

    inputs [layers with a delta net, slots, convolution − 1, channels] in the model's dtype: the
        last tokens' inputs of the convolution, before it; zeros stand for tokens before the first.
    matrices [layers with a delta net, slots, value_heads, key_dim, value_dim]: S.
    """

    inputs: torch.Tensor
    matrices: torch.Tensor

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.inputs.shape[1]

    def restore(self, rows: StateRows) -> None:
        """Copy the cached states with which sequences begin into the sequences' slots.

        rows: places of a step's sequences.
        """
        source, slot = rows.restores.unbind(0)
        for states in (self.inputs, self.matrices) if len(source) else ():
            states[:, slot] = states[:, source]  # all are read before one is written

    def layer(self, index: int) -> "DeltaStates":
        """Return the states of one layer, without the first dimension.

        index: index of the layer among those with a delta net.
        """
        return DeltaStates(self.inputs[index], self.matrices[index])


class DeltaNet:
    """Gated delta net of a layer, of which each rank computes some heads.

    y = out_proj(norm(o) · silu(z)), where o is the delta rule's output over queries, keys and
    values that a convolution of the last tokens and SiLU make of in_proj_qkv(x).
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
        whole, own = shape.delta_net, shard.part_of(shape).delta_net
        assert whole is not None
        assert own is not None
        self.shape, self.eps, self._ranks = own, config.norm_eps, ranks
        self.inputs = LoraLinear(checkpoint, shape, layer, "delta_in", bias=False)
        self.out = LoraLinear(checkpoint, shape, layer, "delta_out", bias=False)
        kept = shard.ranges(shape)
        channels = kept[shape.index("in_proj_qkv")].outputs
        heads = kept[shape.index("in_proj_a")].outputs[0]
        path = f"model.layers.{layer}.linear_attn"
        self.kernel = checkpoint.read_parts(  # [channels, convolution]
            [f"{path}.conv1d.weight"] * len(channels),
            [Cut((whole.convolved, 1, whole.convolution), rows) for rows in channels],
        ).flatten(1)
        each = Cut((whole.value_heads,), heads)
        self.log_decay = checkpoint.read_float32(f"{path}.A_log", each)
        self.step_bias = checkpoint.read_float32(f"{path}.dt_bias", each)
        self.norm = checkpoint.read_parts([f"{path}.norm.weight"], [Cut.whole(whole.value_dim)])

    def __call__(
        self, x: Inputs, states: DeltaStates, rows: StateRows, lora: LoraStep | None
    ) -> Product:
        """Compute the delta net of x [tokens, hidden] → Product [tokens, hidden].

        states: states of this layer; those of the batch's sequences are updated.
        rows: places of the batch's sequences in the states.
        lora: LoRA work of the forward pass; None: no adapter.
        """
        y, delta = self.inputs(x, lora)
        if delta is not None:
            add_delta(y, delta)
        shape = self.shape
        values = shape.value_heads * shape.value_dim
        mixed, z, b, a = torch.split(y, [shape.convolved, values, *[shape.value_heads] * 2], dim=-1)
        mixed = _convolve(mixed, self.kernel, states.inputs, rows)
        o = _delta_rule(mixed, b, a, self, states.matrices, rows)
        gated = _gated_norm(o, z.reshape(o.shape), self.norm, self.eps).flatten(1)
        return summed_product(*self.out(gated, lora), None, self._ranks)


def _convolve(
    x: torch.Tensor, kernel: torch.Tensor, inputs: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    out = torch.empty_like(x)
    for i, slot in enumerate(rows.slots.tolist()):
        begin, end = rows.starts[i : i + 2].tolist()
        saves = {tokens: to for at, tokens, to in rows.saves.T.tolist() if at == i}
        before = inputs[slot].masked_fill(rows.begins[i], 0.0)
        seen = torch.cat([before, x[begin:end]])
        for tokens, to in (*saves.items(), (end - begin, slot)):
            inputs[to] = seen[tokens : tokens + len(before)]
        mixed = F.conv1d(seen.T.unsqueeze(0), kernel.unsqueeze(1), groups=len(kernel))
        out[begin:end] = F.silu(mixed.squeeze(0).T)
    return out


def _delta_rule(
    mixed: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    net: DeltaNet,
    matrices: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    shape = net.shape
    keys = shape.key_heads * shape.key_dim
    q, k, v = torch.split(mixed.float(), [keys, keys, shape.value_heads * shape.value_dim], dim=-1)
    q, k = (part.view(len(part), shape.key_heads, shape.key_dim) for part in (q, k))
    q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    each = shape.value_heads // shape.key_heads
    q, k = (part.repeat_interleave(each, dim=1) for part in (q * shape.key_dim**-0.5, k))
    v = v.view(len(v), shape.value_heads, shape.value_dim)
    beta = b.sigmoid().float()
    decay = (-net.log_decay.exp() * F.softplus(a.float() + net.step_bias)).exp()
    out = torch.empty_like(v)
    for i, slot in enumerate(rows.slots.tolist()):
        begin, end = rows.starts[i : i + 2].tolist()
        saves = {begin + tokens: to for at, tokens, to in rows.saves.T.tolist() if at == i}
        s = matrices[slot].float().masked_fill(rows.begins[i], 0.0)
        for t in range(begin, end):
            s = s * decay[t, :, None, None]
            error = v[t] - torch.einsum("hkv,hk->hv", s, k[t])
            s = s + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error)
            out[t] = torch.einsum("hkv,hk->hv", s, q[t])
            if t + 1 in saves:
                matrices[saves[t + 1]] = s
        matrices[slot] = s
    return out.to(mixed.dtype)


def _gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = o.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (weight * normed.to(o.dtype) * F.silu(z.float())).to(o.dtype)
