"""Draws of tokens from logits: the same logits and uniform number give the same token everywhere.

The draw is defined here to the last bit, so that it is the same in every row of every batch and on
every device. For a row of logits x, whose largest is b:

- weight(t) = 2 ** ((x[t] - b) · scale), with scale = log₂(e) / temperature in float32. 2 ** z is
  the polynomial POWERS of z's fraction, in float32 without fused additions, shifted by z's whole
  part: an integer in units of 2 ** -44. Sums of integers do not depend on their order.
- Tokens are ranked by descending logit; ties go to the lower id (and 0 before -0).
- top_k keeps the first top_k tokens by rank. top_p keeps, of these, each token before which the
  weights add up to less than top_p of the weight that top_k kept. min_p keeps, of these, the tokens
  with a weight of at least `least`.
- A draw takes the first kept token, by id, up to which the weights exceed (uniform · total) >> 64.

top_p needs no sort, but rejection sampling: a token is drawn from those that top_k and min_p keep.
If top_p excludes it, another token is drawn, with the next uniform, from the tokens of a better
rank. The accepted token has the distribution of the kept tokens, as every draw was from a set that
contains all of them.
"""

import torch

from lorikeet_engine.kernels.by_device import by_device

ROW, UNIFORM, SCALE, TOP_K, TOP_P, LEAST, DRAW_FIELDS = range(7)
"""Columns of `draws` [rows, DRAW_FIELDS] int64, one row for each token to draw.

ROW: index of the row of logits.
UNIFORM: 64 random bits, a uniform number in [0, 1) in units of 2 ** -64.
SCALE: log₂(e) / temperature, as the bits of a float32.
TOP_K: number of tokens to keep; 0 keeps all.
TOP_P: top_p, as the bits of a float64.
LEAST: smallest token weight that min_p keeps, in units where the likeliest token's weight is ONE;
    at least 1.
"""

ONE = 1 << 44
"""Weight of the most likely token, in the integer units of weights."""
LEAST_EXPONENT = -60.0
"""Lower bound of the exponents z of token weights 2 ** z; such a small weight rounds to 0."""
POWERS = (
    0.0002161291722974777,
    0.0012467845808714628,
    0.009675451554358006,
    0.05548528209328651,
    0.24022930860519409,
    0.6931470632553101,
    1.0,
)
"""Coefficients of the polynomial for 2 ** f, for f from 0 to 1.

In float32, with a relative error of 1e-7.
"""
NEXT_UNIFORM = 0x9E3779B97F4A7C15
"""Number added to a draw's random bits; the hash of the sum is the next draw's random bits."""
MIXERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Factors of the hash SplitMix64: the first is applied after its shift by 30 bits, the second after
its shift by 27 bits.
"""
_64_BITS = (1 << 64) - 1


@by_device
def draw_tokens(
    logits: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor, draws: torch.Tensor
) -> None:
    """Draw a token for each row of `draws`, and write it to `tokens`.

    logits [rows, vocab], contiguous
    best [rows]: largest logit of each row of logits; if it is not finite, the row's token is
      undefined
    tokens [rows] int64: written in place, only for rows of logits in `draws`
    draws [rows, DRAW_FIELDS] int64: of each draw, the row of logits (ROW), 64 random bits
      (UNIFORM), log₂(e) / temperature as the bits of a float32 (SCALE), top_k (TOP_K), top_p as the
      bits of a float64 (TOP_P), and the smallest integer weight that min_p keeps (LEAST)
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
    """Return a mask of the tokens that top_k, top_p and min_p keep → [rows, vocab] bool.

    Runs on any device, and does not make the host wait for it.

    x [rows, vocab] float32: logits
    draws [rows, DRAW_FIELDS] int64: for row i of x, draws[i] has log₂(e) / temperature as the bits
        of a float32 (SCALE), top_k (TOP_K), top_p as the bits of a float64 (TOP_P), and the
        smallest integer weight that min_p keeps (LEAST). ROW and UNIFORM are not used.
    ranked: whether any row has top_k or top_p; if False, both are ignored
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
