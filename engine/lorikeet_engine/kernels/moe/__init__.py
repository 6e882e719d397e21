"""Mixture of experts: routing of tokens to experts, the experts' products, and their weighted sum.

A pair is a token and one of its experts; a token's j-th expert is pair token · per_token + j.
Products work on rows, one for each pair, sorted by expert and then by token. So tokens of one
adapter, which are neighbours in a step, are neighbours among an expert's rows too. No sum depends
on the order in which programs run.

`reference`: the equations in torch, which run on the CPU.
`fused`: the operators on CUDA.
`routing`: Triton kernels that choose experts, sort pairs and sum results.
`grouped`: products of few rows in Triton; torch's grouped product multiplies a prefill's many rows.
`grouped_fp8`: FP8 products of any number of rows, in Triton.
`mxfp4`: weights of 4 bits, packed; `grouped_mxfp4`: their products of any number of rows.
`clamp`: gpt-oss's activation of experts.
`one_token`, `one_token_mxfp4`: a single token's experts in Triton, without sorting.
"""

from dataclasses import dataclass

import torch

from lorikeet_engine.kernels.by_device import by_device
from lorikeet_engine.kernels.fp8 import Activations, Fp8Rows
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.moe.mxfp4 import Mxfp4Experts
from lorikeet_engine.kernels.routed_rows import RoutedRows

__all__ = [
    "Clamp",
    "ClampedBiases",
    "ExpertWeight",
    "Mxfp4Experts",
    "RoutedRows",
    "Sigmoids",
    "clamped_swiglu",
    "combine",
    "expert_products",
    "experts_of_one",
    "route",
]

_operators = by_device(__name__)
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
    operator = _operators(logits.device.type).route
    routed: RoutedRows = operator(
        logits, per_token, lora, normalised=normalised, sigmoids=sigmoids, factors=factors
    )
    return routed


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
    operator = _operators(routed.pairs.device.type).expert_products
    y: torch.Tensor = operator(x, weight, routed, gathered=gathered)
    return y


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
    operator = _operators(gate_up.device.type).clamped_swiglu
    y: torch.Tensor = operator(gate_up, biases, routed, clamp)
    return y


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
    out: torch.Tensor = _operators(y.device.type).combine(y, routed, biases)
    return out


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
    y: torch.Tensor = _operators(x.device.type).experts_of_one(
        x, gate_up, down, logits, lora, per_token,
        normalised=normalised, gelu=gelu, biases=biases, factors=factors, sigmoids=sigmoids,
        squared_relu=squared_relu,
    )  # fmt: skip
    return y
