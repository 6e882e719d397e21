"""Keys and values in 8 bits: the format of FP8 KV pages, and the scales of a layer's numbers."""

from dataclasses import dataclass

import torch

from lorikeet_engine.kernels.fp8 import DTYPE, LARGEST

FP8_KV = DTYPE  # E4M3 has no infinity


@dataclass(frozen=True, slots=True)
class KvScales:
    """A layer's FP8 pages hold its keys divided by `key`, its values divided by `value`."""

    key: float = 1.0
    value: float = 1.0


def to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Round x / scale to the nearest number of E4M3, what lies beyond them to ±448.

    NaN for what is not finite, so that nobody mistakes an overflow for a large number.
    """
    scaled = x.float() * (1.0 / scale)
    kept = scaled.clamp(-LARGEST, LARGEST).where(scaled.isfinite(), torch.nan)
    return kept.to(FP8_KV)
