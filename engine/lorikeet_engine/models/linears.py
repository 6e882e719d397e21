"""Linears of a decoder's layers, with LoRA and tensor parallelism."""

from collections.abc import Iterator

import torch

from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.adapter_format.families import Parallel
from lorikeet_engine.kernels.lora.linear import (
    FusedWeight,
    Inputs,
    linear_with_lora,
    linear_with_lora_before_act,
)
from lorikeet_engine.kernels.lora.types import LoraDelta, LoraGroup, LoraStep, UnexpandedDelta
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.cut import Cut

_MODELS = "lorikeet_engine.models."


class LoraLinear:
    """Linear layer y[t] = x[t]·Wᵀ + b + B(t)·A(t)·x[t], with A and B of token t's adapter, if any.

    Linears of one group are fused: their weights are stacked in weight [sum(d_outs), d_in], and
    their outputs lie side by side in y. This process has the part of each linear that its
    checkpoint's shard keeps.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shape: BaseShape,
        layer: int,
        group: str,
        *,
        bias: bool,
        wide: bool = False,
    ) -> None:
        """Read the linears of a fused group, such as qkv.

        Raises ModelError if a tensor is missing or malformed.

        shape: shape of the whole model, not of this process's part.
        layer: index of the layer; the shape's outer_layer for a linear outside the layers.
        group: name of one of the shape's groups, or of a linear outside the layers.
        bias: whether the linears have biases.
        wide: whether the linear, the only one of its group, is multiplied in float32.
        """
        linears = shape.members(layer, group)
        modules = [shape.modules[n] for n in linears]
        assert not any(each.of_experts for each in modules), "one matrix for all tokens"
        kept = [checkpoint.shard.ranges(shape)[n] for n in linears]
        self.layer = layer
        self.group = LoraGroup(linears, len(kept[0].inputs), tuple(cut.d_out for cut in kept))
        is_outer = layer == shape.outer_layer
        # each range of rows is read by itself
        parts = [
            (each.module if is_outer else each.path(layer), *shape.dims(n), rows, cut.inputs)
            for n, each, cut in zip(linears, modules, kept, strict=True)
            for rows in cut.outputs
        ]
        self.bias: torch.Tensor | None = None
        if wide:
            ((path, d_in, d_out, rows, columns),) = parts
            cut = Cut((d_out, d_in), rows, columns)
            self.weight: FusedWeight = checkpoint.read_float32(f"{path}.weight", cut)
            return
        floats = [cut for each, cut in zip(modules, kept, strict=True) if each.is_never_fp8]
        self.weight = checkpoint.read_fused(
            [f"{path}.weight" for path, *_ in parts],
            [Cut((d_out, d_in), rows, columns) for _, d_in, d_out, rows, columns in parts],
            floats=sum(len(cut.outputs) for cut in floats),
        )
        biases = [f"{path}.bias" for path, *_ in parts]
        if bias and modules[0].parallel is Parallel.ROW and checkpoint.shard.index:
            checkpoint.leave(biases)  # the first process adds the bias to the sum
        elif bias:
            cuts = [Cut((d_out,), rows) for _, _, d_out, rows, _ in parts]
            self.bias = checkpoint.read_parts(biases, cuts)

    def __call__(self, x: Inputs, lora: LoraStep | None) -> tuple[torch.Tensor, LoraDelta | None]:
        """Return x·Wᵀ + b [tokens, sum(d_outs)], and the LoRA delta to add to it.

        If the linears' inputs are divided among ranks, both are this rank's part of a sum over
        ranks.

        x: input [tokens, d_in].
        lora: LoRA work of the forward pass; None: no adapter.
        """
        return linear_with_lora(x, self.weight, self.bias, lora, self.layer, self.group)

    def before_act(
        self, x: Inputs, lora: LoraStep | None
    ) -> tuple[torch.Tensor, LoraDelta | UnexpandedDelta | None]:
        """Return x·Wᵀ + b and the LoRA delta to add to it, for the activation act_and_mul of an
        MLP, which reads the output of gate_up.

        The LoRA delta may be an UnexpandedDelta: A·x not yet multiplied by B, which only
        act_and_mul can read.
        """
        return linear_with_lora_before_act(x, self.weight, self.bias, lora, self.layer, self.group)


def lora_linears(part: object) -> Iterator[LoraLinear]:
    """Yield the linears with LoRA of a part of a model, such as a layer, and of its own parts."""
    for each in vars(part).values():
        if isinstance(each, LoraLinear):
            yield each
        elif type(each).__module__.startswith(_MODELS) and hasattr(each, "__dict__"):
            yield from lora_linears(each)


def columns(
    y: torch.Tensor, lora: LoraDelta | None, *widths: int
) -> Iterator[tuple[torch.Tensor, LoraDelta | None]]:
    """Split a product's columns: yield a view of the columns of each width, and their LoRA delta.

    y [tokens, sum(widths)]: the product without LoRA.
    lora: LoRA delta of y; None: no adapter.
    """
    parts = torch.split(y, [*widths], dim=1)
    if lora is None:
        yield from ((part, None) for part in parts)
        return
    for part, rows in zip(parts, torch.split(lora.rows, [*widths], dim=1), strict=True):
        yield part, LoraDelta(rows, lora.tokens)


def by_heads(
    y: torch.Tensor, lora: LoraDelta | None, head_dim: int
) -> tuple[torch.Tensor, LoraDelta | None]:
    """Return views of a product and of its LoRA delta as [tokens, heads, head_dim].

    y [tokens, heads · head_dim]: the product without LoRA.
    lora: LoRA delta of y; None: no adapter.
    """
    shape = len(y), -1, head_dim
    rows = None if lora is None else LoraDelta(lora.rows.view(shape), lora.tokens)
    return y.view(shape), rows
