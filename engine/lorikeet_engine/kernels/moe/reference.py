"""Operators of a mixture of experts in pure torch. See kernels.moe for their definitions."""

from itertools import pairwise

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels.fp8 import Activations, Fp8Rows
from lorikeet_engine.kernels.fp8 import reference as fp8
from lorikeet_engine.kernels.lora.linear import rows_of
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.moe import Clamp, ExpertWeight, Mxfp4Experts, Sigmoids
from lorikeet_engine.kernels.routed_rows import RoutedRows


def route(
    logits: torch.Tensor,
    per_token: int,
    lora: LoraDelta | None = None,
    *,
    normalised: bool,
    sigmoids: Sigmoids | None = None,
    factors: torch.Tensor | None = None,
) -> RoutedRows:
    """Choose each token's experts, and sort token-expert pairs by expert: see kernels.moe."""
    scores = logits.float()
    if lora is not None:
        scores[: lora.tokens] += lora.rows[: lora.tokens].float()
    shares = scores.softmax(-1) if sigmoids is None else scores.sigmoid()
    choices = shares if sigmoids is None else _of_kept_groups(shares + sigmoids.bias, sigmoids)
    chosen = choices.argsort(dim=-1, descending=True, stable=True)[:, :per_token]
    weights, experts = shares.gather(1, chosen), chosen.flatten()
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    if sigmoids is not None:
        weights = weights * sigmoids.scale
    if factors is not None:
        weights = weights * factors[chosen]
    pairs = experts.argsort(stable=True)
    rows = torch.empty_like(pairs)
    rows[pairs] = torch.arange(len(pairs), device=pairs.device)
    ends = experts.bincount(minlength=logits.shape[1]).cumsum(0)
    return RoutedRows(
        weights=weights.contiguous(),
        pairs=pairs.int(),
        rows=rows.int().view(-1, per_token),
        experts=experts.int().view(-1, per_token),
        starts=F.pad(ends, (1, 0)).int(),
    )


def _of_kept_groups(choices: torch.Tensor, sigmoids: Sigmoids) -> torch.Tensor:
    """Return choices [tokens, experts] with −∞ for the experts of groups that are not kept."""
    if sigmoids.groups == sigmoids.kept_groups:
        return choices
    grouped = choices.view(len(choices), sigmoids.groups, -1)
    order = grouped.topk(2).values.sum(-1).argsort(dim=-1, descending=True, stable=True)
    lost = order[:, sigmoids.kept_groups :, None].expand(-1, -1, grouped.shape[-1])
    return grouped.scatter(1, lost, -torch.inf).flatten(1)


def expert_products(
    x: torch.Tensor | Activations,
    weight: ExpertWeight,
    routed: RoutedRows,
    *,
    gathered: bool = False,
) -> torch.Tensor:
    """Compute each routed row's product with its expert's weight: see kernels.moe."""
    inputs = rows_of(x)
    d_out = (weight.rows if isinstance(weight, Fp8Rows) else weight).shape[1]
    y = inputs.new_empty(len(routed.pairs), d_out)
    for expert, (start, end) in enumerate(pairwise(routed.starts.tolist())):
        if start == end:
            continue
        rows = slice(start, end)
        of = routed.pairs[rows] // routed.per_token if gathered else rows
        if isinstance(weight, Fp8Rows):
            rounded = x.fp8[of] if isinstance(x, Activations) else None
            y[rows] = fp8.linear(inputs[of], weight[expert], rounded=rounded)
        elif isinstance(weight, Mxfp4Experts):
            y[rows] = F.linear(inputs[of], weight.floats(expert).to(inputs.dtype))
        else:
            y[rows] = F.linear(inputs[of], weight[expert])
    return y


def clamped_swiglu(
    gate_up: torch.Tensor, biases: torch.Tensor, routed: RoutedRows, clamp: Clamp
) -> torch.Tensor:
    """Compute (u + 1) · g · sigmoid(alpha · g) of each routed row: see kernels.moe."""
    expert = routed.experts.flatten()[routed.pairs]
    gates, values = (gate_up.float() + biases[expert].float()).chunk(2, dim=-1)
    gates, values = gates.clamp(max=clamp.limit), values.clamp(-clamp.limit, clamp.limit)
    return ((values + 1) * gates * torch.sigmoid(clamp.alpha * gates)).to(gate_up.dtype)


def combine(
    y: torch.Tensor, routed: RoutedRows, biases: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum each token's expert outputs, multiplied by their weights: see kernels.moe."""
    outputs = y[routed.rows].float()  # [tokens, per_token, width]
    if biases is not None:
        outputs += biases[routed.experts].float()
    return (outputs * routed.weights[..., None]).sum(1).to(y.dtype)
