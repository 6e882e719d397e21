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
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.by_device import by_device
from lorikeet_engine.kernels.fp8_kv import KvScales, to_fp8
from lorikeet_engine.kernels.lora.reference import pieces
from lorikeet_engine.kernels.lora.types import LoraDelta, LoraGroup, LoraStep
from lorikeet_engine.kernels.pointwise import add_lora_delta


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


@by_device
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
    add_lora_delta(y, lora)
    ranks = 0 if norms.queries is None else len(norms.queries), len(norms.keys)
    queries, latents, keys = torch.split(y, [*ranks, y.shape[1] - sum(ranks)], dim=1)
    cached = torch.cat(
        [
            _normed(latents, norms.keys, norms.eps),
            _rotated(keys.unsqueeze(1), cos, sin, interleaved=interleaved).squeeze(1),
        ],
        dim=1,
    )
    stored = slots >= 0
    pages, rows = layer_kv.view(-1, layer_kv.shape[-1]), cached[stored]
    if scales is not None:  # as bytes: torch has no index_copy_ for FP8
        rows, pages = to_fp8(rows, scales.key).view(torch.uint8), pages.view(torch.uint8)
    pages.index_copy_(0, slots[stored], rows)
    return queries if norms.queries is None else _normed(queries, norms.queries, norms.eps)


@by_device
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
    add_lora_delta(q, lora)
    plain, turned = q[..., : weight.plain], q[..., weight.plain :]
    absorbed = (plain.transpose(0, 1) @ weight.rows[:, : weight.plain]).transpose(0, 1)
    for rows, a, b in _adapters(weight, step):
        of_heads = torch.einsum("thn,rhn->thr", plain[rows].float(), b[..., : weight.plain])
        absorbed[rows] += (of_heads @ a).to(q.dtype)
    return torch.cat([absorbed, _rotated(turned, cos, sin, interleaved=interleaved)], dim=-1)


@by_device
def expand_outputs(
    mixed: torch.Tensor, weight: AbsorbedWeight, step: LoraStep | None
) -> torch.Tensor:
    """Compute each head's output from its mix of latents: W_v·c.

    mixed [tokens, heads, kv rank], contiguous: output of attention, whose values were latents
    step: LoRA work of the forward pass, for kv_b_proj; None: no adapter
    → [tokens, heads, values] like mixed, contiguous
    """
    values = weight.rows[:, weight.plain :].mT
    expanded = (mixed.transpose(0, 1) @ values).transpose(0, 1).contiguous()
    for rows, a, b in _adapters(weight, step):
        of_heads = mixed[rows].float() @ a.T
        change = torch.einsum("thr,rhv->thv", of_heads, b[..., weight.plain :])
        expanded[rows] += change.to(mixed.dtype)
    return expanded


def _adapters(
    weight: AbsorbedWeight, step: LoraStep | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield the tokens, A [rank, kv rank] and transposed B [rank, heads, plain + values] of each
    adapter of kv_b_proj, in float32.
    """
    if step is None:
        return
    segments, arena, layer, group = step.segments, step.weights.arena, weight.layer, weight.group
    heads, width, kv_rank = weight.rows.shape
    for rows, _, a_start, b_start, rank, _, factor in pieces(step.weights, segments, layer, group):
        a = arena[a_start : a_start + rank * kv_rank].view(rank, kv_rank)
        b = arena[b_start : b_start + rank * heads * width].view(rank, heads, width)
        yield rows, factor * a.float(), b.float()


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Return x [tokens, heads, rotary] with each pair rotated by its position's angle.

    cos, sin [tokens, rotary / 2]: cosines and sines of the angles.
    interleaved: a pair is (2i, 2i + 1), instead of (i, i + rotary / 2).
    """
    cos, sin, half = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]
    pairs = x.reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    first, second = pairs.float().unbind(-1 if interleaved else -2)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, dim=-1 if interleaved else -2).flatten(-2).to(x.dtype)
