"""log_softmax of selected tokens: the most likely of each row, and one given token.

For a row of logits x, whose largest is b, token t has the log probability
(x[t] − b) · scale − log Σ exp((x − b) · scale), in float32. Tokens are ranked by descending logit;
ties go to the lower id (and 0 before -0).

On CUDA, rows of which more than MOST tokens are wanted are searched by torch as well.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.by_device import by_device

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
_GROUP = 64  # neighbouring tokens


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
    def device(self) -> torch.device:
        """Device of the log probabilities."""
        return self.packed.device

    @property
    def most(self) -> int:
        """Number of most likely tokens that a row of `packed` has space for."""
        return self.packed.shape[1] // 2 - 1


@by_device
def likeliest(logits: torch.Tensor, wanted: torch.Tensor, most: int) -> LogprobRows:
    """Find the most likely tokens of some rows of logits, and their log probabilities.

    logits [rows, vocab], contiguous, any dtype
    wanted [n, FIELDS] int64: index of each row of logits, number of its tokens to find, factor of
        its logits (ROW, COUNT, SCALE); COUNT must not be above `most` or vocab
    most: number of tokens that the result has space for
    """
    return likeliest_by_torch(logits, wanted, most)


@by_device
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
    rows = wanted[:, ROW]
    given = logits[rows, tokens[rows].clamp(min=0)].float().unsqueeze(1)
    found.packed[:, :1] = _logprobs(given, found.norms, wanted)


@by_device
def set_rank(
    found: LogprobRows, logits: torch.Tensor, wanted: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Set the second column of `found.packed` to the rank of each row's given token.

    Rank 1 is the most likely token. All logits of the rows are read. The arguments are those of
    `set_given`.
    """
    rows = wanted[:, ROW]
    x, chosen = logits[rows].float(), tokens[rows].clamp(min=0).unsqueeze(1)
    given, ids = x.gather(1, chosen), torch.arange(x.shape[-1], device=x.device)
    before = (x > given) | ((x == given) & (ids < chosen))
    found.packed[:, 1] = (1 + before.sum(-1)).int().view(torch.float32)


def likeliest_by_torch(logits: torch.Tensor, wanted: torch.Tensor, most: int) -> LogprobRows:
    """Compute `likeliest` on any device, for any number of tokens, some rows at a time."""
    pieces = [_likeliest_of(logits, some, most) for some in torch.split(wanted, _PIECE_ROWS)]
    norms = torch.cat([piece.norms for piece in pieces])
    return LogprobRows(norms, torch.cat([piece.packed for piece in pieces]))


def _likeliest_of(logits: torch.Tensor, wanted: torch.Tensor, most: int) -> LogprobRows:
    x = logits[wanted[:, ROW]].float()
    best = x.amax(dim=-1, keepdim=True)
    log_sum = ((x - best) * _scales(wanted)).logsumexp(dim=-1, keepdim=True)
    norms = torch.cat((best, log_sum), dim=1)
    packed = x.new_zeros((len(x), 2 + 2 * most))
    count = min(most, x.shape[-1])
    ids = _top_ids(x, count)
    packed[:, 2 : 2 + count] = _logprobs(x.gather(1, ids), norms, wanted)
    packed[:, 2 + most : 2 + most + count] = ids.int().view(torch.float32)
    return LogprobRows(norms, packed)


def _logprobs(x: torch.Tensor, norms: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (x - norms[:, :1]) * _scales(wanted) - norms[:, 1:]


def _scales(wanted: torch.Tensor) -> torch.Tensor:
    return wanted[:, SCALE].to(torch.int32).view(torch.float32).unsqueeze(1)


def _top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return ids [rows, k] of the k largest logits [rows, vocab] float32; ties go to the lower id.

    A group of neighbouring columns contains one of the k tokens only if its largest logit is among
    the k largest of all groups, so few logits are sorted.
    """
    vocab = logits.shape[-1]
    padded = F.pad(logits, (0, -vocab % _GROUP), value=-torch.inf)
    groups = padded.view(len(logits), -1, _GROUP)
    ids = torch.arange(groups[0].numel(), device=logits.device).view_as(groups[0])
    chosen = _first(groups.amax(-1), ids[:, 0], min(k, len(ids)))  # [rows, groups that have them]
    values = groups.gather(1, chosen.unsqueeze(-1).expand(-1, -1, _GROUP)).flatten(1)
    candidates = ids[chosen].flatten(1)
    top = candidates.gather(1, _first(values, candidates, k))
    return top.clamp(max=vocab - 1)  # in a row of NaN, padding may be the largest


def _first(values: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """Return the column indices of the k largest values of each row [rows, n] float32; ties go to
    the lowest id.

    topk orders ties arbitrarily, so one key orders values and ids together: a float's bits order
    like an integer, except for the sign.

    ids [n] or [rows, n]: id of each value.
    """
    bits = values.view(torch.int32).long()
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) - ids
    return keys.topk(k, dim=-1).indices
