"""Places of experts' A, B and A·x, for the kernels of single rows and of tiles.

All experts may share a matrix, which the arena then has once ("shared outer"). A that all experts
share is multiplied with a token's x once, for the first of the token's rows. up_proj may share
gate_proj's A: then A·x of gate_proj is that of up_proj, too.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def matrix_at(arena: tl.tensor, place: tl.tensor, expert: tl.tensor, size: tl.tensor) -> tl.tensor:
    """Return a pointer to an expert's matrix.

    place: element of the arena at which the experts' matrices begin (LoraWeights.table); odd if all
        experts share one matrix, which then begins one element earlier.
    expert: index of the expert, int64.
    size: number of elements of a matrix.
    """
    own = tl.where(place % 2 == 0, expert, 0)
    return arena + tl.multiple_of(place // 16 * 16, 16) + own * size


@triton.jit  # type: ignore[untyped-decorator]
def has_preceding_a(entry: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Return whether a linear shares A with the preceding linear of its group.

    entry: pointer to the linear's entry in LoraWeights.table; its rank is above 0.
    index: index of the linear in the group.
    """
    place, rank = tl.load(entry), tl.load(entry + 2)
    before = tl.load(entry - 3, mask=index > 0, other=-1)
    rank_before = tl.load(entry - 1, mask=index > 0, other=0)
    return (place == before) & (rank == rank_before)
