"""Checkpoints of FP8 linears (E4M3), with scales for rows, blocks or whole matrices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from lorikeet_engine.adapter_format import QuantizedLinears
from lorikeet_engine.kernels.fp8 import Fp8Rows
from lorikeet_engine.models.cut import Cut
from lorikeet_engine.models.weight_formats.protocol import PartReader

# Fixed scales of activations, which are not used: activations get a scale for each token.
UNUSED = (".input_scale", ".output_scale", ".activation_scale", ".q_scale", ".prob_scale")
# Names of compressed-tensors, AutoFP8 and ModelOpt; and of transformers and DeepSeek.
_SCALES = (".weight_scale", ".weight_scale_inv")


@dataclass(frozen=True, slots=True)
class Fp8:
    """Reader of FP8 linears, each with a tensor of scales.

    The scales multiply the stored numbers, even if they are named weight_scale_inv.
    """

    stored: QuantizedLinears
    marks: ClassVar[tuple[str, ...]] = _SCALES

    def block(self, cuts: Sequence[Cut]) -> tuple[int, int] | None:
        """Return (height, width) of the largest block that tiles both stored blocks and kept parts.

        Returns None if rows have scales instead of blocks. The result is the same in all processes
        that share linears evenly.

        cuts: the part of each linear's weight that this process keeps.
        """
        if self.stored.block is None:
            return None
        high, wide = self.stored.block
        heights = [side for cut in cuts for side in (cut.rows.start, len(cut.rows))]
        widths = [
            side
            for cut in cuts
            if cut.columns and len(cut.columns) < cut.shape[-1]
            for side in (cut.columns.start, len(cut.columns))
        ]
        return math.gcd(high, *heights), math.gcd(wide, *widths)

    def scales(
        self, weight: str, cut: Cut, block: tuple[int, int] | None, parts: PartReader
    ) -> torch.Tensor:
        """Read the scales of the kept part of a weight, in float32 and the layout of Fp8Rows.

        If the matrix has a single scale, it is repeated for all rows. Raises ModelError if the
        scales are missing or have another shape.

        weight: name of the weight.
        cut: the part of the weight to keep.
        block: height and width of the blocks that get scales, as the method `block` returns them;
            None: rows get scales.
        parts: reader of the stored tensors.
        """
        d_out, d_in = cut.matrix_shape
        if self.stored.block is None or block is None:
            shapes = (d_out, 1), (d_out,), (1,), ()
            of_rows = parts.scales(_scales_of(weight, parts), *shapes).float()
            return of_rows.flatten().expand(d_out)[cut.rows.start : cut.rows.stop]
        (high, wide), (height, width) = self.stored.block, block
        blocks = -(-d_out // high), -(-d_in // wide)
        scales = parts.scales(_scales_of(weight, parts), blocks).float()
        scales = scales.repeat_interleave(high // height, 0).repeat_interleave(wide // width, 1)
        rows, columns = cut.rows, cut.columns or range(d_in)
        return scales[
            rows.start // height : -(-rows.stop // height),
            columns.start // width : -(-columns.stop // width),
        ]

    def dequantize(self, weight: str, d_out: int, d_in: int, parts: PartReader) -> torch.Tensor:
        """Return an FP8 weight's exact values [d_out, d_in] in float32.

        Raises ModelError if the weight or its scales are missing or malformed.

        weight: name of the weight.
        parts: reader of the stored tensors.
        """
        values = parts.part(weight, "F8_E4M3", d_out, d_in)
        block, whole = self.stored.block, Cut.whole(d_out, d_in)
        return Fp8Rows(values, self.scales(weight, whole, block, parts), block).floats()


def _scales_of(weight: str, parts: PartReader) -> str:
    names = [weight.removesuffix(".weight") + name for name in _SCALES]
    return next(name for name in names if name in parts)
