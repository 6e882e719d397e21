"""Operators of latent attention in torch: the equations that the Triton kernels are compared with.

These functions also serve requests on CPUs, so they loop over segments, never over tokens.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.fp8_kv import KvScales, to_fp8
from lorikeet_engine.kernels.latents import AbsorbedWeight, LatentNorms
from lorikeet_engine.kernels.lora.reference import pieces
from lorikeet_engine.kernels.lora.types import LoraDelta, LoraStep
from lorikeet_engine.kernels.pointwise.reference import add_lora_delta


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
    """Normalise latents, rotate shared keys, and write both into KV pages: see kernels.latents."""
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
    """Compute the queries that attend to latents and shared keys: see kernels.latents."""
    add_lora_delta(q, lora)
    plain, turned = q[..., : weight.plain], q[..., weight.plain :]
    absorbed = (plain.transpose(0, 1) @ weight.rows[:, : weight.plain]).transpose(0, 1)
    for rows, a, b in _adapters(weight, step):
        of_heads = torch.einsum("thn,rhn->thr", plain[rows].float(), b[..., : weight.plain])
        absorbed[rows] += (of_heads @ a).to(q.dtype)
    return torch.cat([absorbed, _rotated(turned, cos, sin, interleaved=interleaved)], dim=-1)


def expand_outputs(
    mixed: torch.Tensor, weight: AbsorbedWeight, step: LoraStep | None
) -> torch.Tensor:
    """Compute each head's output from its mix of latents: see kernels.latents."""
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
