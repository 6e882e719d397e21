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


_STEP = tl.constexpr(2 * MAX_MEMBERS)  # between the ends of two ranks; a power of two


@triton.jit  # type: ignore[untyped-decorator]
def members_at(
    table: tl.tensor,
    members: tl.tensor,
    member_weights: tl.tensor,
    slot: tl.tensor,
    slot_stride: tl.tensor,
    linear: tl.tensor,
    known: tl.tensor,
    side: tl.constexpr,
) -> tl.tuple:
    """Find the adapters that a slot adds up → (adapters, for `ranks_at`; sum of their ranks).

    table: where each adapter's A and B begin in the arena, and its rank (LoraWeights).
    members, member_weights: slots of the adapters that each slot adds up, and their weights.
    slot: slot of a composition or of an adapter; −1: of none, with `known` false.
    slot_stride: stride of the table.
    linear: offset of the linear's entry in a slot's part of the table. [ranks] if the ranks belong
        to several linears; the sums are of each rank's linear then.
    known: mask of linears that exist, with the shape of `linear`.
    side: 0 for ranks of A, 1 for B.
    """
    first, i = tl.maximum(slot, 0) * MOST, tl.arange(0, MOST)[:, None]
    # one number says how many ranks end with adapter i, and that i + 1 adapters have ended
    rank, ends = 0, i + 1
    for j in tl.static_range(MOST):  # Triton 3.6 cannot compile a scan along so short an axis
        member = tl.load(members + first + j).to(tl.int64)
        entry = table + member * slot_stride + linear
        own = tl.load(entry + 2, mask=known & (member >= 0), other=0).to(tl.int32)
        ends += tl.where(i >= j, own, 0) * _STEP
        rank += own
    found = table + side, members + first, member_weights + first, slot_stride, linear, ends
    return found, rank


@triton.jit  # type: ignore[untyped-decorator]
def ranks_at(found: tl.tuple, k: tl.tensor, width: tl.tensor) -> tl.tuple:
    """Find where rows of A, or columns of B, of a sum of adapters lie → (element of the arena at
    which each begins, weight of its adapter, whether it exists).

    found: the adapters, from `members_at`.
    k: indices of rows or columns, counted over all adapters one after the other.
    width: elements of a row or column.

    A decode's program is short, so each instruction per rank and adapter counts: this is one
    comparison, one choice and one maximum.
    """
    table, members, member_weights, slot_stride, linear, ends = found
    last = tl.max(tl.where(ends <= (k * _STEP + MOST)[None, :], ends, 0), 0)
    index, first = last & (_STEP - 1), last // _STEP
    exists = index < MOST
    member = tl.load(members + index, mask=exists, other=0).to(tl.int64)
    begin = tl.load(table + member * slot_stride + linear, mask=exists, other=0)
    weight = tl.load(member_weights + index, mask=exists, other=0.0)
    return tl.multiple_of(begin, 16) + (k - first).to(tl.int64) * width, weight, exists
