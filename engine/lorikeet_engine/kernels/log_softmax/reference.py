"""Log probabilities in pure torch. See kernels.log_softmax for their definition."""

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.log_softmax import ROW, SCALE, LogprobRows

_GROUP = 64  # neighbouring tokens


def likeliest(logits: torch.Tensor, wanted: torch.Tensor, most: int) -> LogprobRows:
    """Find the most likely tokens of some rows of logits: see kernels.log_softmax."""
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


def set_given(
    found: LogprobRows, logits: torch.Tensor, wanted: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Set the log probability of each row's given token: see kernels.log_softmax."""
    rows = wanted[:, ROW]
    given = logits[rows, tokens[rows].clamp(min=0)].float().unsqueeze(1)
    found.packed[:, :1] = _logprobs(given, found.norms, wanted)


def set_rank(
    found: LogprobRows, logits: torch.Tensor, wanted: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Set the rank of each row's given token: see kernels.log_softmax."""
    rows = wanted[:, ROW]
    x, chosen = logits[rows].float(), tokens[rows].clamp(min=0).unsqueeze(1)
    given, ids = x.gather(1, chosen), torch.arange(x.shape[-1], device=x.device)
    before = (x > given) | ((x == given) & (ids < chosen))
    found.packed[:, 1] = (1 + before.sum(-1)).int().view(torch.float32)


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
