"""log_softmax of selected tokens: the most likely of each row, and one given token.

For a row of logits x, whose largest is b, token t has the log probability
(x[t] − b) · scale − log Σ exp((x − b) · scale), in float32. Tokens are ranked by descending logit;
ties go to the lower id (and 0 before -0).

`reference` computes this in torch, on the CPU, and on CUDA where more than MOST tokens of a row are
wanted; `fused` holds Triton kernels with the same signatures.
"""

from dataclasses import dataclass

import torch

from lorikeet_engine.kernels.by_device import by_device

_operators = by_device(__name__)
ROW, COUNT, SCALE, FIELDS = range(4)
"""Columns of `wanted` [n, FIELDS] int64, which selects rows of logits.

ROW: index of the row of logits.
COUNT: number of the row's most likely tokens to find.
SCALE: factor of the logits, as the bits of a float32 above 0.
"""
MOST = 32
"""Limit on the number of a row's most likely tokens that the kernels can find."""
_PIECE_ROWS = 16
"""Number of rows that torch searches at once; for a vocabulary of 128,256, some 50 MB."""


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log probabilities of selected tokens of some rows of logits.

    norms [n, 2] float32: of each row, the largest logit b, and log Σ exp((x − b) · scale).
    packed [n, 2 + 2 · most] float32, of each row: the log probability of its given token, which
        the caller of set_given names; this token's rank, from 1, as bits of int32 (see set_rank);
        the log probabilities of the most likely tokens; these tokens' ids, as bits of int32. The
        last two are undefined beyond the row's number of most likely tokens, COUNT.
    """

    norms: torch.Tensor
    packed: torch.Tensor

    @property
    def most(self) -> int:
        """Number of most likely tokens that a row of `packed` has space for."""
        return self.packed.shape[1] // 2 - 1


def likeliest(logits: torch.Tensor, wanted: torch.Tensor, most: int) -> LogprobRows:
    """Find the most likely tokens of some rows of logits, and their log probabilities.

    logits [rows, vocab], contiguous, any dtype
    wanted [n, FIELDS] int64: index of each row of logits, number of its tokens to find, factor of
        its logits (ROW, COUNT, SCALE); COUNT must not be above `most` or vocab
    most: number of tokens that the result has space for
    """
    if most <= MOST:
        found: LogprobRows = _operators(logits.device.type).likeliest(logits, wanted, most)
        return found
    torchs, begins = _operators("cpu"), range(0, len(wanted), _PIECE_ROWS)
    pieces = [torchs.likeliest(logits, wanted[at : at + _PIECE_ROWS], most) for at in begins]
    norms = torch.cat([piece.norms for piece in pieces])
    return LogprobRows(norms, torch.cat([piece.packed for piece in pieces]))


def set_given(
    found: LogprobRows, logits: torch.Tensor, wanted: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Set the first column of `found.packed` to the log probability of one given token of each row
    of logits that `wanted` selects.

    found: result of `likeliest` for the same logits and `wanted`
    logits [rows, vocab]: only logits of given tokens are read; they must be as they were for
      `likeliest`
    wanted [n, FIELDS] int64: rows of the logits, one for each row of found.packed
    tokens [rows] int64: given token of each row of logits; for a token below 0, the row's result is
        undefined
    """
    _operators(logits.device.type).set_given(found, logits, wanted, tokens)


def set_rank(
    found: LogprobRows, logits: torch.Tensor, wanted: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Set the second column of `found.packed` to the rank of each row's given token.

    Rank 1 is the most likely token. All logits of the rows are read. The arguments are those of
    `set_given`.
    """
    _operators(logits.device.type).set_rank(found, logits, wanted, tokens)
