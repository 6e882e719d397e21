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
UNUSED = (".input_scale", ".output_scale", "activation_scale", ".q_scale", ".prob_scale")
# Names of compressed-tensors, AutoFP8 and ModelOpt; and of transformers and DeepSeek, the last of
# them for linears of all experts in one tensor.
_SCALES = (".weight_scale", ".weight_scale_inv", "_scale_inv")


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
        self, weight: str, shape: Sequence[int], block: tuple[int, int] | None, parts: PartReader
    ) -> torch.Tensor:
        """Read the scales of a whole weight: for each matrix [rows] or, with blocks, [blocks of
        rows, blocks of columns], in float32.

        If a matrix has a single scale, it is repeated for all rows. Raises ModelError if the scales
        are missing or have another shape.

        weight: name of the weight.
        shape: shape of the weight: a matrix; or several, each with its own blocks.
        block: height and width of the blocks that get scales, as the method `block` returns them;
            None: rows get scales.
        parts: reader of the stored tensors.
        """
        *matrices, d_out, d_in = shape
        if self.stored.block is None or block is None:
            shapes = (*matrices, d_out, 1), (*matrices, d_out), (1,), ()
            of_rows = parts.scales(_scales_of(weight, parts), *shapes).float()
            return of_rows.flatten().expand(math.prod((*matrices, d_out))).view(*matrices, d_out)
        (high, wide), (height, width) = self.stored.block, block
        blocks = *matrices, -(-d_out // high), -(-d_in // wide)
        scales = parts.scales(_scales_of(weight, parts), blocks).float()
        scales = scales.repeat_interleave(high // height, -2).repeat_interleave(wide // width, -1)
        return scales[..., : -(-d_out // height), : -(-d_in // width)]

    def dequantize(self, weight: str, shape: Sequence[int], parts: PartReader) -> torch.Tensor:
        """Return an FP8 weight's exact values in float32.

        Raises ModelError if the weight or its scales are missing or malformed.

        weight: name of the weight.
        shape: shape of the weight.
        parts: reader of the stored tensors.
        """
        values, block = parts.part(weight, "F8_E4M3", *shape), self.stored.block
        return Fp8Rows(values, self.scales(weight, shape, block, parts), block).floats()


def scales_of_part(scales: torch.Tensor, cut: Cut, block: tuple[int, int] | None) -> torch.Tensor:
    """Return the scales of the kept part of a weight: [rows] or, with blocks, [blocks of rows,
    blocks of columns].

    scales: scales of the whole weight, from Fp8.scales.
    cut: the part of the weight to keep.
    block: height and width of the blocks that have scales; None: rows have scales.
    """
    rows, columns = cut.rows, cut.columns or range(cut.shape[-1])
    if block is None:
        return scales.flatten()[rows.start : rows.stop]
    height, width = block
    return scales.flatten(0, -2)[
        rows.start // height : -(-rows.stop // height),
        columns.start // width : -(-columns.stop // width),
    ]


def _scales_of(weight: str, parts: PartReader) -> str:
    names = [weight.removesuffix(".weight") + name for name in _SCALES]
    return next(name for name in names if name in parts)
