"""A mixture of experts: which experts compute a token, their products, and the sum of these.

A token and one of its experts are a pair, token · per_token + j. Products work on rows, one for
each pair, that are sorted by expert and, of one expert, by token: so tokens of one adapter, which
are neighbours in a step, are neighbours among an expert's rows, too. No sum depends on the order in
which programs run.

`reference` is the equations in torch and runs on the CPU. `fused` runs on CUDA: kernels in Triton,
`routing` around the products and `grouped` for the products of few rows; torch's grouped product
multiplies the many of a prefill. Products of FP8 are `grouped_fp8`'s, however many rows there are.
A single token's experts are computed by `one_token`, without sorting.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from lorikeet_engine.kernels.fp8 import Activations, Fp8Rows
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.routed_rows import RoutedRows

__all__ = ["RoutedRows", "combine", "expert_products", "experts_of_one", "route"]


def route(
    logits: torch.Tensor, per_token: int, lora: LoraDelta | None = None, *, normalised: bool
) -> RoutedRows:
    """Choose the per_token likeliest experts of each token, of equal ones the first.

    logits [tokens, experts], dense; their softmax in float32 weighs the experts, divided by the
    sum of the chosen ones' if normalised. lora belongs to logits.
    """
    operator = _operators(logits.device.type).route
    routed: RoutedRows = operator(logits, per_token, lora, normalised=normalised)
    return routed


def expert_products(
    x: torch.Tensor | Activations,
    weight: torch.Tensor | Fp8Rows,
    routed: RoutedRows,
    *,
    gathered: bool = False,
) -> torch.Tensor:
    """y[r] = x[r] · weight[e]ᵀ of each row r and its expert e; gathered: x[t] of its token t.

    x [rows, d_in], or gathered [tokens, d_in], dense; weight [experts, d_out, d_in], dense → [rows,
    d_out] like x. Sums are float32. With an FP8 weight each row of x is rounded to FP8 before
    (kernels/fp8), if it is not already.
    """
    operator = _operators(routed.pairs.device.type).expert_products
    y: torch.Tensor = operator(x, weight, routed, gathered=gathered)
    return y


def combine(y: torch.Tensor, routed: RoutedRows) -> torch.Tensor:
    """Sum each token's rows of y [rows, width], weighed, in the order of their weights.

    In float32, rounded once → [tokens, width] like y.
    """
    out: torch.Tensor = _operators(y.device.type).combine(y, routed)
    return out


def experts_of_one(
    x: torch.Tensor,
    gate_up: torch.Tensor | Fp8Rows,
    down: torch.Tensor | Fp8Rows,
    logits: torch.Tensor,
    lora: LoraDelta | None,
    per_token: int,
    *,
    normalised: bool,
    gelu: bool,
) -> torch.Tensor:
    """What `combine` gives of both products of a single token's experts, on CUDA.

    x [1, hidden]; gate_up [experts, 2 · width, hidden], down [experts, hidden, width], dense;
    logits, lora and normalised as for `route` → [1, hidden] like x. Between the products stands
    act_and_mul (kernels/pointwise). What FP8 weights multiply is not rounded.
    """
    y: torch.Tensor = _operators(x.device.type).experts_of_one(
        x, gate_up, down, logits, lora, per_token, normalised=normalised, gelu=gelu
    )
    return y


@cache
def _operators(device_type: str) -> ModuleType:
    # Triton is imported only here: a machine without a GPU may have none.
    name = "fused" if device_type == "cuda" else "reference"
    return import_module(f"lorikeet_engine.kernels.moe.{name}")
