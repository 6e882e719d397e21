"""Operators of multi-head latent attention (arXiv 2405.04434, section 2.1) besides attention.

A token's latent c and its rotary key, which all heads share, are all that KV pages hold of a token.
Head h has the key k[h] = (W_k[h]·c, rotary key) and the value v[h] = W_v[h]·c, with W_k and W_v of
kv_b_proj. Neither is ever computed: attention reads latents instead, with queries and outputs
changed to match (the *absorbed* form):

    score   q[h]·k[h] = (W_k[h]ᵀ·q_plain[h])·c + q_rotary[h]·(rotary key)
    output  Σ p·v[h]  = W_v[h]·(Σ p·c)

An adapter of kv_b_proj changes W to W + B·A, with A [rank, latent] of all heads. Each absorbed
product then has a product of low rank beside it, of the adapter of the query's token:

    queries    W_k[h]ᵀ·q + Aᵀ·(B_k[h]ᵀ·q)
    outputs    W_v[h]·c + B_v[h]·(A·c)

`reference`: the equations in torch, which run on the CPU.
`fused`: the operators on CUDA.
"""

from dataclasses import dataclass

import torch

from lorikeet_engine.kernels.by_device import by_device
from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.kernels.lora.types import LoraDelta, LoraGroup, LoraStep

__all__ = ["AbsorbedWeight", "LatentNorms", "absorb_queries", "expand_outputs", "store_latents"]

_operators = by_device(__name__)


@dataclass(frozen=True, slots=True)
class LatentNorms:
    """RMS norms of a token's two latents, the compressed vectors of multi-head latent attention.

    queries [query rank]: weight of the norm of the vector that queries are made of; None: they are
        made of hidden states.
    keys [kv rank]: weight of the norm of the latent of keys and values.
    eps: added to the mean square.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AbsorbedWeight:
    """Weight of a layer's kv_b_proj, and where its adapters are.

    rows [heads, plain + values, kv rank], contiguous: of each head, W_k, which makes its key of a
        latent, then W_v, which makes its value.
    plain: elements of a head's key without rotary embedding; `values` are those of its value.
    layer, group: index of the layer, and kv_b_proj as a group of one linear, by which LoraWeights
        finds the adapters' weights.
    """

    rows: torch.Tensor
    plain: int
    layer: int
    group: LoraGroup


def store_latents(
    y: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer_kv: torch.Tensor,
    slots: torch.Tensor,
    norms: LatentNorms,
    lora: LoraDelta | None = None,
    scales: KvScales | None = None,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Normalise latents, rotate the shared keys, and write both into KV pages.

    y [tokens, query rank + kv rank + rotary], contiguous: output of q_a_proj, latent of keys and
      values, shared key; undefined afterwards. Without norms.queries, query rank is 0
    cos, sin [tokens, rotary / 2] float32, contiguous
    layer_kv [1, pages, page_size, 1, kv rank + rotary] like y, or FP8, contiguous
    slots [tokens] int64: where to write each token, page · page_size + offset; −1: nowhere
    lora: LoRA delta of y, added to y
    scales: for FP8 layer_kv, whose numbers are divided by scales.key
    interleaved: rotate the pairs (2i, 2i + 1) of a key, instead of (i, i + rotary / 2)
    → [tokens, query rank] like y: normalised inputs of q_b_proj
    """
    queries: torch.Tensor = _operators(y.device.type).store_latents(
        y, cos, sin, layer_kv, slots, norms, lora, scales, interleaved=interleaved
    )
    return queries


def absorb_queries(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: AbsorbedWeight,
    lora: LoraDelta | None,
    step: LoraStep | None,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Compute the queries that attend to latents and shared keys: (W_kᵀ·q_plain, rotated q_rotary).

    q [tokens, heads, plain + rotary], contiguous: undefined afterwards
    cos, sin [tokens, rotary / 2] float32, contiguous
    interleaved: rotate the pairs (2i, 2i + 1), instead of (i, i + rotary / 2)
    lora: LoRA delta of q, added to q
    step: LoRA work of the forward pass, for kv_b_proj; None: no adapter
    → [tokens, heads, kv rank + rotary] like q, contiguous
    """
    absorbed: torch.Tensor = _operators(q.device.type).absorb_queries(
        q, cos, sin, weight, lora, step, interleaved=interleaved
    )
    return absorbed


def expand_outputs(
    mixed: torch.Tensor, weight: AbsorbedWeight, step: LoraStep | None
) -> torch.Tensor:
    """Compute each head's output from its mix of latents: W_v·c.

    mixed [tokens, heads, kv rank], contiguous: output of attention, whose values were latents
    step: LoRA work of the forward pass, for kv_b_proj; None: no adapter
    → [tokens, heads, values] like mixed, contiguous
    """
    expanded: torch.Tensor = _operators(mixed.device.type).expand_outputs(mixed, weight, step)
    return expanded
