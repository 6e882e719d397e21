"""LoRA of experts in Triton: shrink and expand over rows that are sorted by expert and adapter.

The grids depend on the number of rows only, so a captured graph stays valid whatever the router
chooses. A run is the neighbouring rows of one expert and one adapter. In a decode a run has a row
or two: then each program computes one row (expert_singles). With longer runs, programs compute
tiles of neighbouring rows (expert_tiles).
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora import expert_singles, expert_tiles
from lorikeet_engine.kernels.lora.types import ExpertStep, LoraGroup, Segments
from lorikeet_engine.kernels.routed_rows import RoutedRows

_BLOCK = 128
_TILED_FROM = 8  # rows of a run: with fewer, tiles would multiply mostly zeros


def list_owners(segments: Segments, routed: RoutedRows) -> torch.Tensor:
    """List each routed row's adapter slot, −1 for none, and its expert → [rows, 2] int32.

    A routed row is a token with one of the experts chosen for it. The result becomes
    ExpertStep.owners.
    """
    rows = len(routed.pairs)
    owners = torch.empty((rows, 2), dtype=torch.int32, device=routed.pairs.device)
    if rows:
        _list_owners[(triton.cdiv(rows, _BLOCK),)](
            routed.pairs, routed.starts, segments.slots, segments.starts, segments.lengths, owners,
            rows, routed.per_token, len(routed.starts) - 1, len(segments),
            block=_BLOCK,
        )  # fmt: skip
    return owners


def add_expert_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    experts: ExpertStep,
    layer: int,
    group: LoraGroup,
    *,
    gathered: bool,
) -> None:
    """Compute y[r] += B(r)·A(r)·x[r] in place: see kernels.lora.experts.add_expert_lora.

    With 16-bit dtypes, A·x is rounded to the adapter's dtype.

    gathered: whether x has a row for each token, instead of one for each row r.
    """
    rows, segments, routed = len(y), experts.step.segments, experts.routed
    if rows == 0 or segments.max_rank == 0:
        return
    per_run = rows // max(1, len(segments) * (len(routed.starts) - 1))
    if per_run < _TILED_FROM:
        expert_singles.add(y, x, experts, layer, group, gathered=gathered)
    else:
        expert_tiles.add(y, x, experts, layer, group, per_run, gathered=gathered)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["rows", "per_token", "experts", "segments"]
)
def _list_owners(
    pairs: tl.tensor,
    expert_starts: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    owners: tl.tensor,
    rows: tl.tensor,
    per_token: tl.tensor,
    experts: tl.tensor,
    segments: tl.tensor,
    block: tl.constexpr,
) -> None:
    """List adapter slot and expert of a block of routed rows.

    A row's slot is the slot of the segment that contains its token. A row's expert is the number of
    experts whose rows end before the row.

    pairs, expert_starts: pair of token and expert of each row, and first row of each expert.
    slots, starts, lengths: adapter slot, first token and number of tokens of each segment.
    per_token: number of experts of a token.
    owners: the list, written here.
    rows, experts, segments: number of routed rows, of experts and of segments.
    block: number of rows, and of experts or segments read at once.
    """
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    token = tl.load(pairs + row, mask=inside, other=0) // per_token
    expert = tl.zeros((block,), tl.int32)
    for first in range(0, experts, block):
        other = first + tl.arange(0, block)
        end = tl.load(expert_starts + 1 + other, mask=other < experts, other=rows)
        ended = (end[None, :] <= row[:, None]) & (other < experts)[None, :]
        expert += tl.sum(ended.to(tl.int32), 1)
    slot = tl.zeros((block,), tl.int32) - 1
    for first in range(0, segments, block):
        other = first + tl.arange(0, block)
        known = other < segments
        begin = tl.load(starts + other, mask=known, other=0)
        end = begin + tl.load(lengths + other, mask=known, other=0)
        mine = (token[:, None] >= begin[None, :]) & (token[:, None] < end[None, :])
        theirs = tl.load(slots + other, mask=known, other=-1)
        slot = tl.maximum(slot, tl.max(tl.where(mine, theirs[None, :], -1), 1))
    tl.store(owners + row * 2, slot, mask=inside)
    tl.store(owners + row * 2 + 1, expert, mask=inside)
