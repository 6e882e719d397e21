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

`reference` computes this in torch, with a sort, on the CPU; `fused` holds Triton kernels with the
same signature.
"""

import torch

from lorikeet_engine.kernels.by_device import by_device

_operators = by_device(__name__)
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


def draw_tokens(
    logits: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor, draws: torch.Tensor
) -> None:
    """Draw a token for each row of `draws`, and write it to `tokens`.

    logits [rows, vocab], contiguous
    best [rows]: largest logit of each row of logits; if it is not finite, the row's token is
      undefined
    tokens [rows] int64: written in place, only for rows of logits in `draws`
    draws [rows, DRAW_FIELDS] int64: of each draw, the row of logits (ROW), 64 random bits
      (UNIFORM), log₂(e) / temperature (SCALE), top_k and top_p (TOP_K, TOP_P), and the smallest
      token weight that min_p keeps (LEAST)
    """
    _operators(logits.device.type).draw_tokens(logits, best, tokens, draws)
