"""Places of the ranks of a composition, for the LoRA kernels.

A composition's ranks are those of its adapters, one adapter after the other, as if one adapter had
them all: v = A·x has a column for each rank, and B·v sums over all. So a composition needs no
further launch and no copy of matrices: kernels look up the place of each rank. Each kernel is
compiled with and without this lookup, and steps without compositions run the latter.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.adapter import MAX_MEMBERS
from lorikeet_engine.kernels.lora.tiles import Tiles
from lorikeet_engine.kernels.lora.types import LoraWeights

MOST = tl.constexpr(MAX_MEMBERS)
"""Largest number of adapters that a composition adds up, for kernels."""


def operands(weights: LoraWeights, tiles: Tiles) -> tuple[torch.Tensor | None, ...]:
    """Return LoraWeights.members and member_weights; None, None for a step without compositions.

    They are the adapters of each composition, a weighted sum of adapters, and the weight of each.
    """
    if not tiles.composed:
        return None, None
    assert weights.members is not None, "tiles of compositions without their members"
    return weights.members, weights.member_weights


@triton.jit  # type: ignore[untyped-decorator]
def ranks_at(
    table: tl.tensor,
    members: tl.tensor,
    member_weights: tl.tensor,
    slot: tl.tensor,
    slot_stride: tl.tensor,
    linear: tl.tensor,
    known: tl.tensor,
    k: tl.tensor,
    width: tl.tensor,
    side: tl.constexpr,
) -> tl.tuple:
    """Find ranks of the adapters that a slot adds up → (element of the arena at which each begins,
    weight of its adapter, number of ranks).

    table: where each adapter's A and B begin in the arena, and its rank (LoraWeights).
    members, member_weights: slots of the adapters that each slot adds up, and their weights.
    slot_stride: stride of the table.
    slot: slot of a composition or of an adapter; −1: of none, with `known` false.
    linear: offset of the linear's entry in a slot's part of the table.
    known: mask of linears that exist.
    k: indices of the ranks. width: elements of a rank. side: 0 for ranks of A, 1 for B.
    """
    rank = (linear * 0).to(tl.int32)
    begins = k.to(tl.int64) * 0
    weights = k.to(tl.float32) * 0.0
    for i in tl.static_range(MOST):
        own_slot = tl.maximum(slot, 0) * MOST + i
        member = tl.load(members + own_slot).to(tl.int64)
        there = known & (member >= 0)
        entry = table + member * slot_stride + linear
        own = tl.load(entry + 2, mask=there, other=0).to(tl.int32)
        begin = tl.multiple_of(tl.load(entry + side, mask=there, other=0), 16)
        inside = (k >= rank) & (k < rank + own)
        begins = tl.where(inside, begin + (k - rank).to(tl.int64) * width, begins)
        weights = tl.where(inside, tl.load(member_weights + own_slot), weights)
        rank += own
    return begins, weights, rank
