"""Checkpoints of FP8 linears (E4M3), with scales of rows, of blocks or of whole matrices."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lorikeet_engine.adapter_format import QuantizedLinears
from lorikeet_engine.models.weight_formats.protocol import PartReader

# What belongs to activations: these are not rounded with fixed scales here.
UNUSED = (".input_scale", ".output_scale", ".activation_scale", ".q_scale", ".prob_scale")
# As compressed-tensors, AutoFP8 and ModelOpt call it; as transformers and DeepSeek.
_SCALES = (".weight_scale", ".weight_scale_inv")


@dataclass(frozen=True, slots=True)
class Fp8:
    """Linears of FP8, each with a tensor of scales, or inverse ones of what it was divided by."""

    stored: QuantizedLinears
    marks: ClassVar[tuple[str, ...]] = _SCALES

    def row_scales(self, weight: str, d_out: int, parts: PartReader) -> torch.Tensor:
        """The scales of a weight's rows [d_out], float32, where it has no blocks.

        A matrix's one scale is that of all its rows. Raises ModelError.
        """
        shapes = (d_out, 1), (d_out,), (1,), ()
        scales = parts.scales(_scales_of(weight, parts), *shapes)
        return scales.float().flatten().expand(d_out)

    def dequantize(self, weight: str, d_out: int, d_in: int, parts: PartReader) -> torch.Tensor:
        """The weight's exact values, [d_out, d_in], in float32. Raises ModelError."""
        values = parts.part(weight, "F8_E4M3", d_out, d_in).float()
        if self.stored.block is None:
            return values * self.row_scales(weight, d_out, parts)[:, None]
        high, wide = self.stored.block
        blocks = -(-d_out // high), -(-d_in // wide)
        scales = parts.scales(_scales_of(weight, parts), blocks).float()
        of_rows = scales.repeat_interleave(high, 0)[:d_out]
        return values * of_rows.repeat_interleave(wide, 1)[:, :d_in]


def _scales_of(weight: str, parts: PartReader) -> str:
    names = [weight.removesuffix(".weight") + name for name in _SCALES]
    return next(name for name in names if name in parts)
