"""Format of FP8 KV pages, and the scales of a layer's keys and values."""

from dataclasses import dataclass

import torch

from lorikeet_engine.kernels.fp8 import DTYPE, LARGEST

FP8_KV = DTYPE  # E4M3 has no infinity


@dataclass(frozen=True, slots=True)
class KvScales:
    """Scales of a layer's FP8 KV pages: pages hold keys divided by `key`, values by `value`."""

    key: float = 1.0
    value: float = 1.0


def to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Round x / scale to the nearest E4M3 number, saturating at ±448.

    Infinity becomes NaN, so that an overflow is not mistaken for a large number.
    """
    scaled = x.float() * (1.0 / scale)
    kept = scaled.clamp(-LARGEST, LARGEST).where(scaled.isfinite(), torch.nan)
    return kept.to(FP8_KV)
