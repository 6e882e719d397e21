"""Mixture of experts: routing of tokens to experts, the experts' products, and their weighted sum.

A pair is a token and one of its experts; a token's j-th expert is pair token · per_token + j.
Products work on rows, one for each pair, sorted by expert and then by token. So tokens of one
adapter, which are neighbours in a step, are neighbours among an expert's rows too. No sum depends
on the order in which programs run.

`routing`: Triton kernels that choose experts, sort pairs and sum results.
`grouped`: products of few rows in Triton; torch's grouped product multiplies a prefill's many rows.
`grouped_fp8`: FP8 products of any number of rows, in Triton.
`mxfp4`: weights of 4 bits, packed; `grouped_mxfp4`: their products of any number of rows.
`clamp`: gpt-oss's activation of experts.
`one_token`, `one_token_mxfp4`: a single token's experts in Triton, without sorting.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels import fp8
from lorikeet_engine.kernels.by_device import by_device
from lorikeet_engine.kernels.fp8 import Activations, Fp8Rows
from lorikeet_engine.kernels.lora.linear import rows_of
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.moe.mxfp4 import Mxfp4Experts
from lorikeet_engine.kernels.routed_rows import RoutedRows

ExpertWeight = torch.Tensor | Fp8Rows | Mxfp4Experts
"""Weights [experts, d_out, d_in] of a layer's experts, in floats, FP8 or MXFP4."""


@dataclass(frozen=True, slots=True)
class Clamp:
    """Constants of the activation clamped_swiglu, (u + 1) · g · sigmoid(alpha · g).

    alpha: factor of gates g in the sigmoid.
    limit: largest gate g, and largest magnitude of the values u that are gated.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Sigmoids:
    """Constants of routing by sigmoids of the experts' logits, instead of a softmax.

    bias [experts] float32: added to the sigmoids by which experts are chosen, not to weights.
    scale: factor of all weights.
    groups: number of groups of equally many neighbouring experts. A token's experts are chosen from
        some groups only: those whose two likeliest experts, bias included, add up to the most.
    kept_groups: number of these groups.
    """

    bias: torch.Tensor
    scale: float
    groups: int = 1
    kept_groups: int = 1


@dataclass(frozen=True, slots=True)
class ClampedBiases:
    """Biases of experts whose activation is clamped_swiglu.

    gate_up [experts, 2 · width], down [experts, hidden], contiguous; down None: the output gets no
    biases.
    clamp: constants of clamped_swiglu.
    """

    clamp: Clamp
    gate_up: torch.Tensor
    down: torch.Tensor | None


@by_device
def route(
    logits: torch.Tensor,
    per_token: int,
    lora: LoraDelta | None = None,
    *,
    normalised: bool,
    sigmoids: Sigmoids | None = None,
    factors: torch.Tensor | None = None,
) -> RoutedRows:
    """Choose the `per_token` likeliest experts of each token; ties go to the lower index.

    An expert's weight is softmax(logits), in float32, divided by the sum of the chosen experts'
    weights if normalised. With `sigmoids`, it is sigmoid(logit) instead, times the scale after the
    division, and the experts of the largest sigmoid(logit) + bias are chosen, of the groups that
    are kept.

    logits [tokens, experts], contiguous
    lora: LoRA delta that is added to the logits; None: no adapter
    sigmoids: constants of weights by sigmoids; None: softmax
    factors [experts] float32: factor of each expert's weight, last; None: 1
    """
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


@by_device
def expert_products(
    x: torch.Tensor | Activations,
    weight: ExpertWeight,
    routed: RoutedRows,
    *,
    gathered: bool = False,
) -> torch.Tensor:
    """Compute y[r] = x[r]·weight[e]ᵀ for each routed row r and its expert e.

    x [rows, d_in], contiguous; if gathered [tokens, d_in], and row r reads x of its token
    weight [experts, d_out, d_in], contiguous
    → [rows, d_out] like x

    Sums are float32. With an FP8 weight, x is rounded to FP8 row by row first (kernels/fp8), unless
    it is rounded already. An MXFP4 weight is decoded while it is multiplied, and x not rounded.
    """
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


@by_device
def clamped_swiglu(
    gate_up: torch.Tensor, biases: torch.Tensor, routed: RoutedRows, clamp: Clamp
) -> torch.Tensor:
    """Compute (u + 1) · g · sigmoid(alpha · g) of each routed row, rounded once.

    g is at most `limit`, u is from −limit to limit.

    gate_up [rows, 2 · width], contiguous: g, then u, without biases
    biases [experts, 2 · width], contiguous: added to the row of each expert
    clamp: alpha and limit
    → [rows, width] like gate_up
    """
    expert = routed.experts.flatten()[routed.pairs]
    gates, values = (gate_up.float() + biases[expert].float()).chunk(2, dim=-1)
    gates, values = gates.clamp(max=clamp.limit), values.clamp(-clamp.limit, clamp.limit)
    return ((values + 1) * gates * torch.sigmoid(clamp.alpha * gates)).to(gate_up.dtype)


@by_device
def combine(
    y: torch.Tensor, routed: RoutedRows, biases: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute out[t] = Σ_j weights[t, j] · y[row of (t, j)]: each token's weighted expert outputs.

    Adds in the order of j.

    y [rows, width]: output of each routed row's expert
    biases [experts, width], contiguous: added to the outputs of each expert; None: no biases
    → [tokens, width] like y

    Sums are float32, rounded once.
    """
    outputs = y[routed.rows].float()  # [tokens, per_token, width]
    if biases is not None:
        outputs += biases[routed.experts].float()
    return (outputs * routed.weights[..., None]).sum(1).to(y.dtype)


@by_device
def experts_of_one(
    x: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    logits: torch.Tensor,
    lora: LoraDelta | None,
    per_token: int,
    *,
    normalised: bool,
    gelu: bool,
    biases: ClampedBiases | None = None,
    factors: torch.Tensor | None = None,
    sigmoids: Sigmoids | None = None,
    squared_relu: bool = False,
) -> torch.Tensor:
    """Compute the experts' MLPs of a single token, from routing to the weighted sum, on CUDA.

    Computes `route`, gate_up's products, act_and_mul (kernels/pointwise), down's products and
    `combine`. Inputs of FP8 weights are not rounded. With biases, the activation is clamped_swiglu.

    Weights in MXFP4 have biases.

    x [1, hidden]
    gate_up [experts, 2 · width, hidden], contiguous
    down [experts, hidden, width], contiguous
    logits [1, experts]
    lora: LoRA delta that is added to the logits; None: no adapter
    per_token, normalised, factors, sigmoids: as for `route`
    biases: biases and clamp of clamped_swiglu, which then replaces act_and_mul
    gelu: GELU instead of SiLU
    squared_relu: squared ReLU instead of act_and_mul; gate_up is [experts, width, hidden]
    → [1, hidden] like x
    """
    raise NotImplementedError("a single token's experts have kernels on CUDA only")


def _of_kept_groups(choices: torch.Tensor, sigmoids: Sigmoids) -> torch.Tensor:
    """Return choices [tokens, experts] with −∞ for the experts of groups that are not kept."""
    if sigmoids.groups == sigmoids.kept_groups:
        return choices
    grouped = choices.view(len(choices), sigmoids.groups, -1)
    order = grouped.topk(2).values.sum(-1).argsort(dim=-1, descending=True, stable=True)
    lost = order[:, sigmoids.kept_groups :, None].expand(-1, -1, grouped.shape[-1])
    return grouped.scatter(1, lost, -torch.inf).flatten(1)
