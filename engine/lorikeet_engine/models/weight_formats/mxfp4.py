"""MXFP4, the 4-bit floats of gpt-oss's experts (OCP Microscaling Formats 1.0), as OpenAI stores it.

32 neighbouring inputs share a scale 2^(s − 127). A weight is one of 16 numbers (E2M1) times it.
"""

from collections.abc import Sequence

import torch

from lorikeet_engine.errors import ModelError
from lorikeet_engine.models.weight_formats.protocol import PartReader

_BLOCK = 32
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
        """Suffix by which a tensor of this format is recognised, see WeightFormat."""
        return ("_blocks",)

    def dequantize(self, weight: str, shape: Sequence[int], parts: PartReader) -> torch.Tensor:
        """Return the exact values [experts, d_in, d_out] of experts' weights, in bfloat16.

        Raises ModelError if a tensor is missing or malformed, or if d_in is no multiple of 32.

        weight: name of the weights.
        shape: (experts, d_in, d_out).
        parts: reader of the stored tensors.
        """
        experts, d_in, d_out = shape
        if d_in % _BLOCK:
            raise ModelError(
                f"{weight} has {d_in} inputs: MXFP4 wants blocks of {_BLOCK}", field=weight
            )
        blocks = d_in // _BLOCK
        packed = parts.part(f"{weight}_blocks", "U8", experts, d_out, blocks, _BLOCK // 2)
        exponents = parts.part(f"{weight}_scales", "U8", experts, d_out, blocks)
        levels = torch.tensor(_LEVELS, device=packed.device)
        values = torch.empty(experts, d_in, d_out, dtype=torch.bfloat16, device=packed.device)
        for expert in range(experts):  # one by one, which bounds the memory
            codes = torch.stack([packed[expert] & 15, packed[expert] >> 4], dim=-1).flatten(-2)
            floats = levels[codes.int()] * _scales(exponents[expert])[..., None]
            values[expert] = floats.flatten(1).T
        return values


def _scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(s − 127) in float32 for each s; NaN for 255."""
    wide = exponents.int()
    bits = torch.where(wide == 0, _LEAST, wide << _BITS_BEFORE_EXPONENT)
    return torch.where(wide == _NAN_SCALE, _NAN, bits).int().view(torch.float32)
