"""Launch parameters and counters of products whose inputs several programs share (split-K)."""

from dataclasses import dataclass
from functools import cache

import torch

_MOST_TILES = 1 << 14  # of a weight: a million outputs


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Launch parameters of a product.

    block_out, block_in: size, in outputs and inputs, of the weight tile that a program multiplies
        at once.
    split: number of programs among which the inputs of each output are divided (split-K).
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
