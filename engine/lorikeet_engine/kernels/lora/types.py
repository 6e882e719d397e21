"""What the LoRA operators work on: the arena of weights, and who uses which of them in a step."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """All adapters on the device.

    arena [elements]: every adapter's packed A [rank, d_in] and B, transposed, [rank, d_out], in
    the adapter dtype. So the rows of both are as long as a hidden state, whatever the rank.
    table [slots, layers, linears, 3] int64: for slot, layer and linear the element offsets of
    A and B in the arena, both multiples of 16, and the rank; rank 0 means that the adapter leaves
    this linear as it is. The scaling is already inside B.
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

    slots, starts, lengths: [segments] int32 on the device of the step; at most one segment for
    each slot. They follow one another from token 0 on; tokens after the last have no adapter.
    max_rank bounds the rank of every adapter in the step.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    max_rank: int

    def __len__(self) -> int:
        return self.slots.numel()


@dataclass(frozen=True, slots=True)
class LoraStep:
    """The LoRA work of one forward pass; tiles: on CUDA, kernels.lora.tiles' list of it."""

    weights: LoraWeights
    segments: Segments
    tiles: Any


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

    rows [tokens, width], in the product's dtype; tokens [1] int32 on the device: so many rows, the
    first, are to be added; the others are undefined.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
