"""Launch parameters and counters of products whose inputs several programs share (split-K)."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

_MOST_TILES = 1 << 14  # of a weight: a million outputs


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Launch parameters of a product.

    block_out, block_in: size, in outputs and inputs, of the weight tile that a program multiplies
        at once.
    split: number of programs among which the inputs of each output are divided (split-K).
    warps, stages: Triton's num_warps and num_stages.
    """

    block_out: int
    block_in: int
    split: int
    warps: int
    stages: int


@cache
def arrived(device: torch.device) -> torch.Tensor:
    """Return the device's counters of programs that have finished their partial sums, one counter
    for each output tile.

    They are 0 between launches: the last program of a tile resets the tile's counter.
    """
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


@triton.jit  # type: ignore[untyped-decorator]
def turned(step: tl.tensor, begin: tl.tensor, end: tl.tensor, tile: tl.tensor) -> tl.tensor:
    """Return the block of inputs for a step of a program, so that programs begin with different
    ones.

    All programs read all inputs of the tokens, and a GPU's L2 cache answers requests for the same
    bytes one after another. If few tokens are multiplied, programs that keep step with each other
    wait for that: a product of 2 tokens took an H200 52 µs, and takes 37.

    step: number from `begin` to `end`, excluded.
    begin, end: the program's blocks of inputs.
    tile: index of the program's tile of outputs.
    """
    block = step + tile % (end - begin)
    return tl.where(block < end, block, block - (end - begin))
