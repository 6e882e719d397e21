"""What the LoRA operators work on: the arena of weights, and who uses which of them in a step."""

from dataclasses import dataclass
from typing import Any

import torch

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.routed_rows import RoutedRows


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """All adapters on the device.

    arena [elements]: every adapter's packed A [rank, d_in] and B, transposed, [rank, d_out], in
    the adapter dtype. So the rows of both are as long as a hidden state, whatever the rank. Of the
    embeddings A is transposed, too, [vocabulary, rank].
    table [slots, layers + 1, modules, 3] int64, as BaseShape says: for slot, layer and linear the
    element offsets of A and B in the arena, both multiples of 16, and the rank; rank 0 means that
    the adapter leaves this linear as it is. The scaling is already inside B. For rows of trained
    tokens, which replace the base model's, A has the rows [tokens, hidden] and B [tokens, 3] the
    tokens' ids to the base of 256, the lowest digit first.
    """

    arena: torch.Tensor
    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """One fused linear: which rows of the table it holds and where their outputs lie.

    linears: indices into the table, for instance (0, 1, 2) for qkv.
    d_in: width of the shared input. d_outs: width of each output, in order.
    """

    linears: tuple[int, ...]
    d_in: int
    d_outs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of consecutive tokens that share an adapter: the first tokens of a step.

    For lm_head, which computes some of the tokens alone, runs of its rows instead.
    slots, starts, lengths: [segments] int32, dense, on the device of the step; at most one segment
    for each slot. They follow one another from token 0 on; tokens after the last have no adapter.
    max_rank bounds the rank of every adapter in them; max_rows, where they are lm_head's, how many
    of its rows each replaces, 0 where none does. changes_experts: whether some adapter may change
    linears of experts.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    max_rank: int
    max_rows: int = 0
    changes_experts: bool = True

    def __len__(self) -> int:
        return self.slots.numel()


@dataclass(frozen=True, slots=True)
class LoraStep:
    """The LoRA work of one forward pass; tiles: on CUDA, kernels.lora.tiles' list of it."""

    weights: LoraWeights
    segments: Segments
    tiles: Any


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """The LoRA work of one layer's experts in a step.

    owners [rows, 2] int32: the slot of each row's adapter, −1 for none, and its expert.
    """

    step: LoraStep
    routed: RoutedRows
    owners: torch.Tensor


@dataclass(frozen=True, slots=True)
class UnexpandedDelta:
    """What adapters add to a product, still to be multiplied by B.

    v: as shrink returns it, of this layer and group. tiles: the step's, of kernels.lora.tiles.
    """

    v: torch.Tensor
    weights: LoraWeights
    tiles: Any
    layer: int
    group: LoraGroup


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """What adapters add to a product, until the operator that reads the product adds it.

    rows [tokens, width], in the product's dtype; tokens [1] int32 on the device: how many rows, the
    first, are to be added; the others are undefined.
    """

    rows: torch.Tensor
    tokens: torch.Tensor


def check_rows(name: str, rows: torch.Tensor, width: int, weights: LoraWeights) -> None:
    """Raise ShapeError unless rows is [tokens, width], dense in a row, on the arena's device."""
    if rows.dim() != 2 or rows.shape[1] != width or rows.stride(1) != 1:
        raise ShapeError(
            f"{name} is {tuple(rows.shape)} with strides {rows.stride()}; "
            f"want [tokens, {width}] with neighbouring columns"
        )
    if rows.device != weights.arena.device:
        raise ShapeError(f"{name} is on {rows.device}, the adapters on {weights.arena.device}")


def check_group(weights: LoraWeights, group: LoraGroup) -> None:
    """Raise ShapeError unless the group's linears are neighbours in a dense table."""
    first, count = group.linears[0], len(group.linears)
    if group.linears != tuple(range(first, first + count)):
        raise ShapeError(f"a fused group's linears are neighbours in the table: {group.linears}")
    if len(group.d_outs) != count:
        raise ShapeError(f"{count} linears but {len(group.d_outs)} output widths")
    if first + count > weights.table.shape[2] or not weights.table.is_contiguous():
        raise ShapeError(f"linears {group.linears} in a table of {tuple(weights.table.shape)}")
