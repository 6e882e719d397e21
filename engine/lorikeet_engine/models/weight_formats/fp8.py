"""Checkpoints of FP8 linears (E4M3), with scales of rows, of blocks or of whole matrices."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from lorikeet_engine.adapter_format import QuantizedLinears
from lorikeet_engine.models.weight_formats.protocol import PartReader

# What belongs to activations, or to keys and values: these are not rounded with fixed scales here.
UNUSED = (
    *(".input_scale", ".output_scale", ".activation_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".prob_scale"),
)


@dataclass(frozen=True, slots=True)
class Fp8:
    """Linears of FP8, each with a tensor of scales, or inverse ones of what it was divided by."""

    stored: QuantizedLinears

    def holds(self, weight: str, stored: Collection[str]) -> bool:
        """Whether a weight is stored in this format, by the names of all tensors."""
        return self._scales_of(weight) in stored

    def row_scales(self, weight: str, d_out: int, parts: PartReader) -> torch.Tensor:
        """The scales of a weight's rows [d_out], float32, where it has no blocks.

        A matrix's one scale is that of all its rows. Raises ModelError.
        """
        scales = parts.scales(self._scales_of(weight), (d_out, 1), (d_out,), (1,), ())
        return scales.flatten().expand(d_out)

    def dequantize(self, weight: str, d_out: int, d_in: int, parts: PartReader) -> torch.Tensor:
        """The weight's exact values, [d_out, d_in], in float32. Raises ModelError."""
        values = parts.part(weight, "F8_E4M3", d_out, d_in).float()
        if self.stored.block is None:
            return values * self.row_scales(weight, d_out, parts)[:, None]
        high, wide = self.stored.block
        blocks = -(-d_out // high), -(-d_in // wide)
        scales = parts.scales(self._scales_of(weight), blocks)
        of_rows = scales.repeat_interleave(high, 0)[:d_out]
        return values * of_rows.repeat_interleave(wide, 1)[:, :d_in]

    def _scales_of(self, weight: str) -> str:
        return f"{weight.removesuffix('weight')}{self.stored.scales}"
