"""How products of few tokens are launched, by GPU, weight and tokens: read from tuning.json.

`engine/benchmarks/tune_fp8.py` writes that file's entry of the GPU it runs on. A GPU without one
multiplies by cuBLASLt, as all do from MAX_TOKENS on and where that was measured to be as fast.
"""

import json
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path

import torch

PATH = Path(__file__).with_name("tuning.json")
TOKENS = (16, 32, 64, 128, 256)
"""How many tokens a product may have, at most, for each of which a weight has a config."""


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How a product is launched.

    block_out, block_in: of the weight, multiplied at once. programs: on each multiprocessor.
    tma: whether Hopper's copying engine fetches blocks, not the threads.
    """

    block_out: int
    block_in: int
    programs: int
    warps: int
    stages: int
    tma: bool


@cache
def product_config(
    d_out: int, d_in: int, tokens: int, device: torch.device
) -> ProductConfig | None:
    """How to multiply so many tokens by a weight [d_out, d_in]; None: by cuBLASLt.

    A weight that was not measured is taken for the one that was and has most nearly its size.
    """
    if device.type != "cuda" or tokens > TOKENS[-1]:
        return None
    weights = json.loads(PATH.read_text()).get(torch.cuda.get_device_name(device))
    if weights is None:
        return None
    nearest = min(weights, key=lambda name: _distance(name, d_out, d_in))
    most = next(count for count in TOKENS if count >= tokens)
    config = weights[nearest][str(most)]
    return config and ProductConfig(**config)


def _distance(name: str, d_out: int, d_in: int) -> tuple[float, float]:
    """How far a weight is from another by its bytes; of weights as large, by d_in."""
    high, wide = map(int, name.split("x"))
    return abs(log(high * wide / (d_out * d_in))), abs(log(wide / d_in))
