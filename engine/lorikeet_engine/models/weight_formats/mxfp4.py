"""MXFP4, the 4-bit floats of gpt-oss's experts (OCP Microscaling Formats 1.0), as OpenAI stores it.

32 neighbouring inputs share a scale 2^(s − 127). A weight is one of 16 numbers (E2M1) times it.
"""

from collections.abc import Sequence

import torch

from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.moe.mxfp4 import BLOCK, Mxfp4Experts, pack, part
from lorikeet_engine.models.weight_formats.protocol import PartReader, not_divided, not_packed

# by code: a sign bit, two bits of exponent, one of mantissa
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEVELS = (*_MAGNITUDES, *(-level for level in _MAGNITUDES))
_BITS_BEFORE_EXPONENT = 23  # of a float32
_LEAST = 1 << 22  # bits of 2^−127, which has no exponent bits
_NAN, _NAN_SCALE = 0x7FC00000, 255


class Mxfp4:
    """Reader of experts in MXFP4: two codes in a byte, low half first.

    A tensor [experts, d_in, d_out] is stored as blocks [experts, d_out, d_in / 32, 16] and scales
    [experts, d_out, d_in / 32].
    """

    @property
    def marks(self) -> tuple[str, ...]:
        """Suffix by which a tensor of this format is recognised: the checkpoint has a tensor whose
        name is the linear's path plus the suffix.
        """
        return ("_blocks",)

    def dequantize(self, weight: str, shape: Sequence[int], parts: PartReader) -> torch.Tensor:
        """Return the exact values [experts, d_in, d_out] of experts' weights, in bfloat16.

        Raises ModelError if a tensor is missing or malformed, or if d_in is no multiple of 32.

        weight: name of the weights.
        shape: (experts, d_in, d_out).
        parts: reader of the stored tensors.
        """
        experts, d_in, d_out = shape
        packed, exponents = _stored(weight, shape, parts)
        levels = torch.tensor(_LEVELS, device=packed.device)
        values = torch.empty(experts, d_in, d_out, dtype=torch.bfloat16, device=packed.device)
        for expert in range(experts):  # one by one, which bounds the memory
            codes = torch.stack([packed[expert] & 15, packed[expert] >> 4], dim=-1).flatten(-2)
            floats = levels[codes.int()] * _scales(exponents[expert])[..., None]
            values[expert] = floats.flatten(1).T
        return values

    def pack_experts(
        self,
        weight: str,
        shape: Sequence[int],
        parts: PartReader,
        rows: Sequence[range],
        columns: range,
    ) -> Mxfp4Experts:
        """Return a part of experts' weights, packed for the kernels, with their exact values.

        Raises ModelError if a tensor is missing or malformed, if d_in is no multiple of 32, or if
        the part or its scales cannot be packed.

        weight: name of the weights.
        shape: (experts, d_in, d_out).
        parts: reader of the stored tensors.
        rows: outputs to keep, in order.
        columns: inputs to keep.
        """
        blocks, exponents = _stored(weight, shape, parts)
        try:
            codes, scales = part(blocks.flatten(2), exponents, rows, columns)
        except ValueError as error:
            raise not_divided(weight, error) from error
        try:
            return pack(codes, scales)
        except ValueError as error:
            raise not_packed(weight, error, instead="fp8") from error


def _stored(
    weight: str, shape: Sequence[int], parts: PartReader
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read blocks [experts, d_out, d_in / 32, 16] and scales [experts, d_out, d_in / 32]."""
    experts, d_in, d_out = shape
    if d_in % BLOCK:
        raise ModelError(f"{weight} has {d_in} inputs: MXFP4 wants blocks of {BLOCK}", field=weight)
    blocks = d_in // BLOCK
    codes = parts.part(f"{weight}_blocks", "U8", experts, d_out, blocks, BLOCK // 2)
    return codes, parts.part(f"{weight}_scales", "U8", experts, d_out, blocks)


def _scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(s − 127) in float32 for each s; NaN for 255."""
    wide = exponents.int()
    bits = torch.where(wide == 0, _LEAST, wide << _BITS_BEFORE_EXPONENT)
    return torch.where(wide == _NAN_SCALE, _NAN, bits).int().view(torch.float32)
