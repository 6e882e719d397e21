"""The list of work both Triton kernels walk: tiles of tokens, each inside one segment.

The host knows how many tokens and segments a step has, the device alone how the tokens are shared
out. So a launch has as many programs as any sharing out can need, tile_bound(), and each program
finds its own tile by summing the segments' lengths; the few programs left over return at once. A
captured CUDA graph therefore stays valid while starts, lengths and slots change under it, and
segments of length 0 pad it.
"""

import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.types import Segments

SMALL_TILE = 16
LARGE_TILE = 64
LARGEST_RANK_BLOCK = 64


def tile_tokens(tokens: int, segments: Segments) -> int:
    """How many tokens a tile holds: large once an even share of the tokens would fill one."""
    return LARGE_TILE if tokens >= LARGE_TILE * len(segments) else SMALL_TILE


def tile_bound(tokens: int, segments: Segments, block_tokens: int) -> int:
    """The most tiles that `tokens` tokens can make in these segments."""
    return tokens // block_tokens + len(segments)


def rank_block(max_rank: int) -> int:
    """How much of the rank one tl.dot takes; its operands want at least 16."""
    return int(min(LARGEST_RANK_BLOCK, max(16, triton.next_power_of_2(max_rank))))


@triton.jit  # type: ignore[untyped-decorator]
def find_tile(
    program: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    segments: tl.tensor,
    block_tokens: tl.constexpr,
    block_segments: tl.constexpr,
) -> tl.tuple:
    """(segment, token rows [block_tokens] int64, which rows are real) of this program's tile.

    block_segments: a power of two ≥ segments. A program left over gets a segment ≥ segments.
    """
    index = tl.arange(0, block_segments)
    tiles = tl.cdiv(tl.load(lengths + index, mask=index < segments, other=0), block_tokens)
    ends = tl.cumsum(tiles, 0)
    segment = tl.sum((ends <= program).to(tl.int32), 0)
    tile = program - tl.sum(tl.where(index < segment, tiles, 0), 0)
    known = segment < segments
    start = tl.load(starts + segment, mask=known, other=0)
    length = tl.load(lengths + segment, mask=known, other=0)
    offsets = tile * block_tokens + tl.arange(0, block_tokens)
    return segment, (start + offsets).to(tl.int64), offsets < length
