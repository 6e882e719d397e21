"""Operators of a mixture of experts on CUDA. See kernels.moe for their definitions."""

from functools import partial

import torch
import triton

from lorikeet_engine.kernels.fp8 import Activations, Fp8Rows
from lorikeet_engine.kernels.fp8.fused import quantize_rows
from lorikeet_engine.kernels.lora.linear import rows_of
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.moe import (
    Clamp,
    ClampedBiases,
    ExpertWeight,
    Sigmoids,
    grouped_fp8,
    grouped_mxfp4,
    one_token,
    one_token_mxfp4,
)
from lorikeet_engine.kernels.moe.clamp import gate_clamped
from lorikeet_engine.kernels.moe.grouped import is_torchs_better, products
from lorikeet_engine.kernels.moe.mxfp4 import Mxfp4Experts
from lorikeet_engine.kernels.moe.routing import choose_experts, sort_by_expert, sum_weighed
from lorikeet_engine.kernels.routed_rows import RoutedRows

__all__ = ["clamped_swiglu", "combine", "expert_products", "experts_of_one", "route"]

_SORTED = 1024  # pairs that a program reads at a time
_COLUMNS = 1024  # of one program of sum_weighed


def route(
    logits: torch.Tensor,
    per_token: int,
    lora: LoraDelta | None = None,
    *,
    normalised: bool,
    sigmoids: Sigmoids | None = None,
    factors: torch.Tensor | None = None,
) -> RoutedRows:
    """Choose each token's experts, and sort token-expert pairs by expert: see kernels.moe.

    Two launches: a program for each token, then a program for each expert.
    """
    tokens, experts = logits.shape
    ints = partial(torch.empty, dtype=torch.int32, device=logits.device)
    chosen, weights = choose_experts(
        logits, lora, per_token, normalised=normalised, sigmoids=sigmoids, factors=factors
    )
    rows, pairs, starts = ints(chosen.shape), ints(tokens * per_token), ints(experts + 1)
    block = min(_SORTED, triton.next_power_of_2(len(pairs)))
    sort_by_expert[(experts,)](chosen, pairs, rows, starts, len(pairs), experts, block)
    return RoutedRows(weights, pairs, rows, chosen, starts)


def expert_products(
    x: torch.Tensor | Activations,
    weight: ExpertWeight,
    routed: RoutedRows,
    *,
    gathered: bool = False,
) -> torch.Tensor:
    """Compute each routed row's product with its expert's weight: see kernels.moe.

    This takes one launch, or torch's grouped product if experts have many rows. For an FP8 weight,
    another launch rounds x unless it is rounded already.
    """
    if isinstance(weight, Fp8Rows):
        rounded = x.fp8 if isinstance(x, Activations) else quantize_rows(x)
        dtype = rows_of(x).dtype
        return grouped_fp8.products(rounded, weight, routed, dtype, gathered=gathered)
    x = rows_of(x)
    if isinstance(weight, Mxfp4Experts):
        return grouped_mxfp4.products(x, weight, routed, gathered=gathered)
    if is_torchs_better(x, weight, len(routed.pairs), gathered=gathered):
        inputs = x[routed.pairs // routed.per_token] if gathered else x
        y: torch.Tensor = torch._grouped_mm(inputs, weight.transpose(1, 2), offs=routed.starts[1:])
        return y
    return products(x, weight, routed, gathered=gathered)


def clamped_swiglu(
    gate_up: torch.Tensor, biases: torch.Tensor, routed: RoutedRows, clamp: Clamp
) -> torch.Tensor:
    """Compute (u + 1) · g · sigmoid(alpha · g) of each routed row: see kernels.moe."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    y = gate_up.new_empty((rows, width))
    gate_clamped[(rows, triton.cdiv(width, _COLUMNS))](
        gate_up, biases, routed.pairs, routed.experts, y, clamp.alpha, clamp.limit, width, _COLUMNS
    )
    return y


def combine(
    y: torch.Tensor, routed: RoutedRows, biases: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum each token's expert outputs, multiplied by their weights: see kernels.moe."""
    tokens, width = len(routed.weights), y.shape[1]
    out = y.new_empty((tokens, width))
    sum_weighed[(tokens, triton.cdiv(width, _COLUMNS))](
        y, routed.rows, routed.weights, biases, routed.experts, out, width, routed.per_token,
        _COLUMNS,
    )  # fmt: skip
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
    """Compute the experts' MLPs of a single token: see kernels.moe.

    x [1, hidden], contiguous. This takes three launches.
    """
    chosen, weights = choose_experts(
        logits, lora, per_token, normalised=normalised, factors=factors, sigmoids=sigmoids
    )
    if isinstance(gate_up, Mxfp4Experts):
        assert isinstance(down, Mxfp4Experts)
        assert biases is not None
        gated = one_token_mxfp4.gate_up_of(x, gate_up, chosen, biases)
        return one_token_mxfp4.down_of(gated, down, chosen, weights, biases.down)
    assert not isinstance(down, Mxfp4Experts)
    gated = one_token.gate_up_of(
        x, gate_up, chosen, gelu=gelu, biases=biases, squared_relu=squared_relu
    )
    of_down = None if biases is None else biases.down
    return one_token.down_of(gated, down, chosen, weights, of_down)
