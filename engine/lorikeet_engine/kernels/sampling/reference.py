"""Draws of tokens in pure torch. See kernels.sampling for their definition."""

import torch

from lorikeet_engine.kernels.sampling import (
    LEAST,
    LEAST_EXPONENT,
    MIXERS,
    NEXT_UNIFORM,
    POWERS,
    ROW,
    SCALE,
    TOP_K,
    TOP_P,
    UNIFORM,
)

_64_BITS = (1 << 64) - 1


def draw_tokens(
    logits: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor, draws: torch.Tensor
) -> None:
    """Draw a token of `logits` for each row of `draws`, and write it to `tokens`.

    best [rows]: largest logit of each row of logits.
    draws [draws, DRAW_FIELDS] int64: row of logits, random bits and filters of each draw.
    """
    rows = draws[:, ROW]
    x = logits[rows].float()
    weights = _weights(x, best[rows].float(), draws[:, SCALE].to(torch.int32).view(torch.float32))
    left = weights >= draws[:, LEAST, None]
    top_k, top_p = draws[:, TOP_K], draws[:, TOP_P].contiguous().view(torch.float64)
    uniforms = [uniform & _64_BITS for uniform in draws[:, UNIFORM].tolist()]
    if not top_k.any() and bool((top_p >= 1.0).all()):
        tokens[rows] = _draw(weights.where(left, 0), uniforms)
        return
    ranks, before = _ranked(x, weights)
    in_k = (ranks < top_k[:, None]) | (top_k[:, None] == 0)
    left &= in_k
    total = weights.where(in_k, 0).sum(-1)
    reach = (top_p * total.double()).long().clamp(min=1)
    drawn = _draw(weights.where(left, 0), uniforms)
    beyond = before.gather(1, drawn[:, None]).squeeze(1) >= reach
    beyond = (beyond & (top_p < 1.0)).nonzero().squeeze(1)
    while len(beyond):
        left[beyond] &= ranks[beyond] < ranks[beyond, drawn[beyond], None]
        for i in beyond.tolist():
            uniforms[i] = _mix((uniforms[i] + NEXT_UNIFORM) & _64_BITS)
        some = weights[beyond].where(left[beyond], 0)
        drawn[beyond] = _draw(some, [uniforms[i] for i in beyond.tolist()])
        beyond = beyond[before[beyond, drawn[beyond]] >= reach[beyond]]
    tokens[rows] = drawn


def kept_tokens(x: torch.Tensor, draws: torch.Tensor, *, ranked: bool) -> torch.Tensor:
    """Return which tokens top_k, top_p and min_p keep → [rows, vocab] bool, on any device.

    The host does not wait for the device.

    x [rows, vocab] float32: logits
    draws [rows, DRAW_FIELDS] int64: of each row SCALE (log₂(e) / temperature), TOP_K, TOP_P and
        LEAST (smallest weight that min_p keeps); ROW and UNIFORM are not used
    ranked: whether any row has top_k or top_p
    """
    scale = draws[:, SCALE].to(torch.int32).view(torch.float32)
    weights = _weights(x, x.amax(-1), scale)
    kept = weights >= draws[:, LEAST, None]
    if not ranked:
        return kept
    top_k, top_p = draws[:, TOP_K, None], draws[:, TOP_P, None].contiguous().view(torch.float64)
    ranks, before = _ranked(x, weights)
    in_k = (ranks < top_k) | (top_k == 0)
    total = weights.where(in_k, 0).sum(-1, keepdim=True)
    reach = (top_p * total.double()).long().clamp(min=1)
    return kept & in_k & ((before < reach) | (top_p >= 1.0))


def _mix(bits: int) -> int:
    """Mix 64 bits by the hash SplitMix64."""
    for shift, factor in zip((30, 27), MIXERS, strict=True):
        bits = ((bits ^ (bits >> shift)) * factor) & _64_BITS
    return bits ^ (bits >> 31)


def _weights(x: torch.Tensor, best: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the weights [rows, vocab] int64 of logits x [rows, vocab], in units of 2 ** −44.

    A weight is 2 ** ((x − best) · scale).

    Weights are 0 in a row whose largest logit, its `best`, is not finite.

    scale [rows]: log₂(e) / temperature.
    """
    z = ((x - best[:, None]) * scale[:, None]).nan_to_num(nan=LEAST_EXPONENT)
    z = z.clamp(min=LEAST_EXPONENT)
    whole = (z - 0.5).round()  # half to even, as an addition of 1.5 · 2 ** 23 rounds
    part = z - whole
    power = torch.full_like(part, POWERS[0])
    for coefficient in POWERS[1:]:
        power = power * part + coefficient
    mantissa = power.view(torch.int32).long() - (127 << 23) + (1 << 23)  # linear where it is < 1
    return (mantissa << 21) >> -whole.long()


def _ranked(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's rank in its row, and the sum of the weights of all tokens of better rank.

    Tokens of larger logits rank better; ties go to the lower id. Both are [rows, vocab] int64.
    """
    bits = x.view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # ordered as the floats are
    order = keys.sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.empty_like(order)
    ranks.scatter_(1, order, torch.arange(x.shape[-1], device=x.device).expand_as(order))
    ordered = weights.gather(1, order)
    return ranks, (ordered.cumsum(-1) - ordered).gather(1, ranks)


def _draw(weights: torch.Tensor, uniforms: list[int]) -> torch.Tensor:
    """Draw a token for each row: the first id at which the running sum of the row's weights
    exceeds (uniform · total of the weights) >> 64.

    weights [rows, vocab] int64
    uniforms: 64 random bits for each row
    → [rows] int64
    """
    cumulative = weights.cumsum(-1)
    totals = cumulative[:, -1].tolist()
    reached = torch.tensor([u * total >> 64 for u, total in zip(uniforms, totals, strict=True)])
    drawn = torch.searchsorted(cumulative, reached[:, None], right=True).squeeze(1)
    return drawn.clamp(max=weights.shape[-1] - 1)
