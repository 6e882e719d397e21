"""LoRA of the matrix products of a layer's experts. Rows are sorted by expert (kernels/moe).

An adapter has an A and B for each expert, or one of either for all experts. Within the rows of one
expert, the rows of one adapter are neighbours: a run of rows, as a segment is a run of tokens in
other linears.
"""

from importlib import import_module
from typing import Any

import torch

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.lora import reference
from lorikeet_engine.kernels.lora.types import (
    ExpertStep,
    LoraGroup,
    LoraStep,
    check_group,
    check_rows,
)
from lorikeet_engine.kernels.routed_rows import RoutedRows


def begin_experts(step: LoraStep | None, routed: RoutedRows) -> ExpertStep | None:
    """Prepare the LoRA work of a layer's experts after routing; on CUDA by one launch.

    Returns None if no adapter of the step changes experts.

    step: LoRA work of the forward pass; None: no adapters.
    routed: the tokens of the layer, sorted by expert.
    """
    if step is None or not step.segments.changes_experts:
        return None
    list_owners = reference.list_owners if step.tiles is None else _triton().list_owners
    return ExpertStep(step, routed, list_owners(step.segments, routed))


def add_expert_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    experts: ExpertStep | None,
    layer: int,
    group: LoraGroup,
    *,
    gathered: bool = False,
) -> None:
    """Compute y[r] += B(r)·A(r)·x[r] for each row r, with its adapter and expert, in place.

    x [rows, d_in]; if gathered [tokens, d_in], and row r reads x of its token
    y [rows, sum(d_outs)]: outputs of the group's linears side by side, all of one width
    experts: LoRA work of the layer's experts; None adds nothing

    In the arena, an expert's A starts rank · d_in elements after the previous expert's A, and an
    expert's B rank · d_out elements after the previous expert's B; a matrix that all experts share
    is there once. Sums are float32; rows without an adapter keep their y. Raises ShapeError if an
    operand's shape or layout does not fit.
    """
    if experts is None:
        return
    weights = experts.step.weights
    check_group(weights, group)
    check_rows("x", x, group.d_in, weights)
    check_rows("y", y, sum(group.d_outs), weights)
    if len(y) != len(experts.owners) or len(set(group.d_outs)) != 1:
        raise ShapeError(f"y is {tuple(y.shape)}: want {len(experts.owners)} rows, of one width")
    add = reference.add_expert_lora if experts.step.tiles is None else _triton().add_expert_lora
    add(y, x, experts, layer, group, gathered=gathered)


def _triton() -> Any:
    # Imported only here: a machine without a GPU may have no Triton.
    return import_module("lorikeet_engine.kernels.lora.expert_rows")
