"""The list of work that the Triton kernels walk: tiles of tokens, each of one adapter or of none.

One small launch makes it at the start of a step, from the segments as they lie on the device. The
host knows how many tokens and segments there can be, the device alone how the tokens are shared
out: so the list is as long as any sharing out can need, and the programs of the tiles left over,
of length 0, return at once. A captured CUDA graph therefore stays valid while the segments change
under it, and segments of length 0 pad it.
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
    """A step's tiles and how the kernels are launched.

    rows [tiles, 3] int32: an adapter's slot, −1 for none, a tile's first token and how many it has,
    at most config.tokens. tokens [1] int32: how many of the step have an adapter; they are the
    first. segments: how many there are, those of length 0 too.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    segments: int
    max_rank: int
    regime: Regime
    config: LaunchConfig

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def act_expands(self) -> bool:
        """Whether act_and_mul expands the delta of gate_up itself."""
        return self.regime == Regime.PREFILL

    @property
    def rank_stride(self) -> int:
        """How many columns one linear has in v: tl.dot takes ranks by 16."""
        return -(-self.max_rank // 16) * 16

    @property
    def ranks_at_once(self) -> int:
        """What one tl.dot of expand takes of the rank."""
        return int(min(64, triton.next_power_of_2(self.rank_stride)))


def list_tiles(segments: Segments, tokens: int) -> Tiles:
    """The tiles of a step of `tokens` tokens."""
    device, count = segments.slots.device, len(segments)
    regime = Regime.of(tokens, count)
    config = launch_config(regime, device)
    # Σ ceil(length / T) ≤ Σ (length + T − 1) / T, the tokens without an adapter being one more
    capacity = min(tokens, (tokens + (count + 1) * (config.tokens - 1)) // config.tokens)
    rows = torch.empty((capacity, 3), dtype=torch.int32, device=device)
    total = torch.empty(1, dtype=torch.int32, device=device)
    _list_tiles[(count + 1,)](
        segments.slots, segments.starts, segments.lengths, rows, total,
        count, tokens, capacity, config.tokens, block=_BLOCK,
    )  # fmt: skip
    return Tiles(rows, total, count, segments.max_rank, regime, config)


def launches_early(tiles: Tiles, device: torch.device) -> bool:
    """Whether expand is launched before shrink is over, and waits for it inside.

    Hopper can. In a prefill it would hold the few multiprocessors that are left to LoRA, and
    shrink needs them.
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
    """The tiles of one segment; the last program's are of no adapter, and empty in the end."""
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
    """(slot int64, first token, tokens) of a tile."""
    row = rows + tile * 3
    return tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2)
