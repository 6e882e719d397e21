"""The operators of a mixture of experts in plain torch; the package says what each computes."""

from itertools import pairwise

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.moe.types import RoutedRows


def route(
    logits: torch.Tensor, per_token: int, lora: LoraDelta | None = None, *, normalised: bool
) -> RoutedRows:
    """See kernels.moe."""
    scores = logits.float()
    if lora is not None:
        scores[: lora.tokens] += lora.rows[: lora.tokens].float()
    weights, experts = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :per_token], experts[:, :per_token].flatten()
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    pairs = experts.argsort(stable=True)
    rows = torch.empty_like(pairs)
    rows[pairs] = torch.arange(len(pairs), device=pairs.device)
    ends = experts.bincount(minlength=logits.shape[1]).cumsum(0)
    return RoutedRows(
        weights=weights.contiguous(),
        pairs=pairs.int(),
        rows=rows.int().view(-1, per_token),
        starts=F.pad(ends, (1, 0)).int(),
    )


def expert_products(
    x: torch.Tensor, weight: torch.Tensor, routed: RoutedRows, *, gathered: bool = False
) -> torch.Tensor:
    """See kernels.moe."""
    inputs = x[routed.pairs // routed.per_token] if gathered else x
    y = x.new_empty(len(inputs), weight.shape[1])
    starts = routed.starts.tolist()
    for expert, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            y[start:end] = F.linear(inputs[start:end], weight[expert])
    return y


def combine(y: torch.Tensor, routed: RoutedRows) -> torch.Tensor:
    """See kernels.moe."""
    weighed = y[routed.rows].float() * routed.weights[..., None]  # [tokens, per_token, width]
    return weighed.sum(1).to(y.dtype)
