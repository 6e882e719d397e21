"""Draws tokens from logits.

How a row's token is drawn, of logits x with the largest at b, is defined here to the last bit, so
that it is the same in every row of every batch and on every device:

- weight(t) = 2 ** ((x[t] - b) · scale), with scale = log₂(e) / temperature in float32. 2 ** z is
  the polynomial POWERS of z's fraction, in float32 without fused additions, shifted by z's whole
  part: an integer in units of 2 ** -44. Sums of integers do not depend on their order.
- Tokens are ranked by falling logit; of equal logits the lower id comes first (and 0 before -0).
- top_k keeps the first top_k by rank. Of them, top_p keeps each before which the weights add up to
  less than top_p of all that top_k kept. Of those, min_p keeps the weights of at least `least`.
- A draw takes the first kept token, by id, up to which the weights exceed (uniform · total) >> 64.
  No sort is needed for top_p: a token is drawn from what top_k and min_p keep, and if it is beyond
  top_p, another one, with the next uniform, from those of a better rank than it. What comes has the
  distribution of the kept tokens: whatever was drawn before it, it was drawn from a set that holds
  them all.

`reference` is this in torch, with a sort, and runs on the CPU; `fused` holds Triton kernels with
the same signature.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

ROW, UNIFORM, SCALE, TOP_K, TOP_P, LEAST, DRAW_FIELDS = range(7)
"""The columns of `draws` [rows, DRAW_FIELDS] int64.

The row of the logits; the uniform's 64 bits; scale, bits of a float32; top_k, 0 for all; top_p,
bits of a float64; the least weight that min_p keeps, at least 1.
"""

ONE = 1 << 44
"""The weight of the most likely token."""
LEAST_EXPONENT = -60.0
"""Exponents are cut here, where a weight is 0 long since."""
POWERS = (
    0.0002161291722974777,
    0.0012467845808714628,
    0.009675451554358006,
    0.05548528209328651,
    0.24022930860519409,
    0.6931470632553101,
    1.0,
)
"""2 ** f for f from 0 to 1, but for 1e-7 of it: the polynomial's coefficients in float32."""
NEXT_UNIFORM = 0x9E3779B97F4A7C15
"""What is added to a uniform's bits before they are mixed for the next draw."""
MIXERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""SplitMix64's factors, after shifts by 30 and 27 bits; then comes one by 31."""


def draw_tokens(
    logits: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor, draws: torch.Tensor
) -> None:
    """Set tokens [rows] int64 of the rows in `draws` to what is drawn from their logits.

    logits [rows, vocab], dense; best [rows]: each row's largest logit. A row whose best is not
    finite is left alone, or set to any token.
    """
    _operators(logits.device.type).draw_tokens(logits, best, tokens, draws)


@cache
def _operators(device_type: str) -> ModuleType:
    # Triton is imported only here: a machine without a GPU may have none.
    name = "fused" if device_type == "cuda" else "reference"
    return import_module(f"lorikeet_engine.kernels.sampling.{name}")
