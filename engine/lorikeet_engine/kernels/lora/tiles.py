"""Work list of the LoRA kernels: tiles of tokens, each of one adapter or of none.

One small launch lists the tiles at the start of a step, from the segments on the device. The host
knows the numbers of tokens and segments; only the device knows each segment's length. So the list
is long enough for all possible lengths, and programs of unused tiles, of length 0, return at once.
A captured CUDA graph therefore stays valid while the segments change; its unused segments have
length 0.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.tuning import LaunchConfig, Regime, launch_config
from lorikeet_engine.kernels.lora.types import Segments

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of tokens of a step, and launch parameters of the LoRA kernels.

    rows [tiles, 3] int32: of each tile, the adapter slot (−1 for none), the first token, and the
        number of tokens, at most config.tokens.
    tokens [1] int32: number of tokens with an adapter, which come first in the step.
    segments: number of segments (runs of tokens of one adapter), including those of length 0.
    max_rank: upper bound of the adapters' ranks.
    regime, config: regime of the step (few, dense or prefill), and its launch parameters.
    composed: whether some slot may hold a composition, a weighted sum of adapters.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    segments: int
    max_rank: int
    regime: Regime
    config: LaunchConfig
    composed: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def act_expands(self) -> bool:
        """Whether act_and_mul itself multiplies gate_up's v = A·x by B (expand_act.py)."""
        return self.regime == Regime.PREFILL

    @property
    def rank_stride(self) -> int:
        """Columns of each linear in v = A·x: max_rank rounded up to 16, as tl.dot requires."""
        return -(-self.max_rank // 16) * 16

    @property
    def ranks_at_once(self) -> int:
        """Number of ranks that one tl.dot of `expand` multiplies."""
        return int(min(64, triton.next_power_of_2(self.rank_stride)))


def list_tiles(segments: Segments, tokens: int) -> Tiles:
    """List the tiles of tokens of a step.

    tokens: number of tokens of the step, including those without an adapter.
    """
    device, count = segments.slots.device, len(segments)
    regime = Regime.of(tokens, count)
    config = launch_config(regime, device)
    # Σ ceil(length / T) ≤ Σ (length + T − 1) / T; tokens without an adapter are one more segment
    capacity = min(tokens, (tokens + (count + 1) * (config.tokens - 1)) // config.tokens)
    rows = torch.empty((capacity, 3), dtype=torch.int32, device=device)
    total = torch.empty(1, dtype=torch.int32, device=device)
    _list_tiles[(count + 1,)](
        segments.slots, segments.starts, segments.lengths, rows, total,
        count, tokens, capacity, config.tokens, block=_BLOCK,
    )  # fmt: skip
    return Tiles(rows, total, count, segments.max_rank, regime, config, segments.composed)


def launches_early(tiles: Tiles, device: torch.device) -> bool:
    """Return whether `expand` is launched before `shrink` ends, and waits for it on the GPU.

    Requires Hopper (programmatic dependent launch). False in a prefill, in which `expand` would
    occupy the few multiprocessors left to LoRA, which `shrink` needs.
    """
    return tiles.regime != Regime.PREFILL and _is_hopper(device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["segments", "tokens", "capacity", "tile_tokens"]
)
def _list_tiles(
    slots: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    rows: tl.tensor,
    total: tl.tensor,
    segments: tl.tensor,
    tokens: tl.tensor,
    capacity: tl.tensor,
    tile_tokens: tl.tensor,
    block: tl.constexpr,
) -> None:
    """List the tiles of one segment, a run of tokens of one adapter.

    One more program, after the programs of all segments, lists the tiles of tokens without an
    adapter, then the unused tiles.

    slots, starts, lengths: adapter slot, first token and number of tokens of each segment.
    segments, tokens: number of segments and of tokens in the step.
    rows, total: Tiles.rows and Tiles.tokens, written here.
    capacity: number of tiles to list. tile_tokens: maximum number of tokens of a tile.
    block: number of segments or tiles computed at once.
    """
    segment = tl.program_id(0)
    known = segment < segments
    before = 0
    adapted = 0
    for first in range(0, segment, block):
        other = first + tl.arange(0, block)
        length = tl.load(lengths + other, mask=other < segment, other=0)
        before += tl.sum(tl.cdiv(length, tile_tokens), 0)
        adapted += tl.sum(length, 0)
    slot = tl.load(slots + segment, mask=known, other=-1)
    start = tl.where(known, tl.load(starts + segment, mask=known, other=0), adapted)
    length = tl.load(lengths + segment, mask=known, other=0)
    length = tl.where(known, length, tokens - adapted)
    tiles = tl.where(known, tl.cdiv(length, tile_tokens), capacity - before)
    for first in range(0, tiles, block):
        tile = first + tl.arange(0, block)
        inside = tile < tiles
        row, done = rows + (before + tile) * 3, tile * tile_tokens
        tl.store(row, tl.zeros_like(tile) + slot, mask=inside)
        tl.store(row + 1, start + done, mask=inside)
        tl.store(row + 2, tl.minimum(tl.maximum(length - done, 0), tile_tokens), mask=inside)
    if segment == segments:
        tl.store(total, adapted)


@triton.jit  # type: ignore[untyped-decorator]
def tile_at(rows: tl.tensor, tile: tl.tensor) -> tl.tuple:
    """Return (adapter slot int64, first token, number of tokens) of a tile.

    rows: the step's tiles (Tiles.rows).
    tile: index of the tile.
    """
    row = rows + tile * 3
    return tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2)
