"""Experts' weights in MXFP4 (OCP Microscaling Formats 1.0), packed for the kernels.

32 neighbouring inputs share a scale 2^(s − 127). A weight is one of 16 numbers (E2M1) times it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 32
"""Number of inputs that share a scale."""
BLOCKS = 4
"""Number of blocks in a group, whose codes share words."""
GROUP = BLOCK * BLOCKS
BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
"""Bits of a word that hold the code of each block: sign, high and low bit of exponent, mantissa.

Those of the first block are where bfloat16 has them: the number's value times 2^−126. Those of the
next two are there once the word is shifted left by 3 and by 6.
"""
LARGEST_SCALE = 128
"""Largest scale s that can be packed: 2^(s − 127) is 2."""
SCALE_OFFSET = 126
"""Added to a scale s: the exponent bits of the bfloat16 number 2^(s − 1), which is 2^(s − 127)
times the 2^126 that the codes lack.
"""


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """Weights W [experts, d_out, d_in] in MXFP4: 4-bit codes, and a scale for each 32 inputs.

    Inputs are in groups of 128, that is of four blocks, so that a kernel reads 16 bytes at a time,
    and decodes them without moving values between threads: word j of a group holds the codes of
    input j of each of its blocks (BITS). Blocks beyond d_in are 0. All tensors are contiguous.

    words [experts, groups, d_out, 32] int16
    scales [experts, groups, d_out] int32: SCALE_OFFSET + s of each block, the first in the lowest
        byte. A block's scale is 2^(s − 127).
    d_in: number of inputs, a multiple of 32.
    """

    words: torch.Tensor
    scales: torch.Tensor
    d_in: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of W: (experts, d_out, d_in)."""
        experts, _, d_out, _ = self.words.shape
        return experts, d_out, self.d_in

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of the scales."""
        return self.words.nbytes + self.scales.nbytes

    def floats(self, expert: int) -> torch.Tensor:
        """Return the exact values [d_out, d_in] of an expert's weight, in float32."""
        words, scales = self.words[expert].int(), self.scales[expert]
        blocks = []
        for block, places in enumerate(BITS):
            bits = torch.zeros_like(words)
            for place, to in zip(places, BITS[0], strict=True):
                bits |= (words >> place & 1) << to
            codes = bits.short().view(torch.bfloat16).float()
            factor = ((scales >> 8 * block & 255) << 23).view(torch.float32)
            blocks.append(codes * factor[..., None])
        values = torch.stack(blocks, 2).transpose(0, 1)  # [d_out, groups, 4, 32]
        return values.flatten(1)[:, : self.d_in]


def pack(codes: torch.Tensor, scales: torch.Tensor) -> Mxfp4Experts:
    """Pack all experts' weights in the form of Mxfp4Experts.

    codes [experts, d_out, d_in / 2] uint8: two E2M1 codes in a byte, the even input's in the low
        half.
    scales [experts, d_out, d_in / 32] uint8: s of each block, whose scale is 2^(s − 127).

    Raises ValueError if a scale is above LARGEST_SCALE, which includes the scale that means NaN.
    """
    experts, d_out, blocks = scales.shape
    groups = -(-blocks // BLOCKS)
    if not scales.is_meta and scales.numel() and int(scales.max()) > LARGEST_SCALE:
        raise ValueError(f"it has a scale of {int(scales.max())}, above {LARGEST_SCALE}")
    device = codes.device
    words = torch.empty(experts, groups, d_out, BLOCK, dtype=torch.int16, device=device)
    packed = torch.empty(experts, groups, d_out, dtype=torch.int32, device=device)
    if words.is_meta:
        return Mxfp4Experts(words, packed, blocks * BLOCK)
    placed = torch.tensor([_placed(places) for places in BITS], device=device)
    for expert in range(experts):  # one by one, which bounds the memory
        halves = torch.stack([codes[expert] & 15, codes[expert] >> 4], -1)
        of_block = halves.new_zeros(d_out, groups * BLOCKS, BLOCK)
        of_block[:, :blocks] = halves.view(d_out, blocks, BLOCK)
        exponents = packed.new_zeros(d_out, groups * BLOCKS)
        exponents[:, :blocks] = scales[expert].int() + SCALE_OFFSET
        for block in range(BLOCKS):
            part = placed[block][of_block[:, block::BLOCKS].int()].transpose(0, 1)
            exponent = (exponents[:, block::BLOCKS] << 8 * block).t()
            words[expert] = words[expert] | part if block else part
            packed[expert] = packed[expert] | exponent if block else exponent
    return Mxfp4Experts(words, packed, blocks * BLOCK)


def part(
    codes: torch.Tensor, scales: torch.Tensor, rows: Sequence[range], columns: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs `rows`, in this order, and the inputs `columns` of codes and scales.

    Raises ValueError if `columns` does not begin and end at multiples of 32 inputs.

    codes, scales: as for `pack`, of which the first dimension is experts.
    """
    first, last = columns.start, columns.stop
    if first % BLOCK or last % BLOCK:
        raise ValueError(f"inputs {first} to {last} are no multiples of {BLOCK}")
    kept = codes[..., first // 2 : last // 2], scales[..., first // BLOCK : last // BLOCK]
    some = [slice(each.start, each.stop, each.step) for each in rows]
    of_codes, of_scales = (torch.cat([each[:, of] for of in some], 1) for each in kept)
    return of_codes, of_scales


def _placed(places: Sequence[int]) -> list[int]:
    """Return, for each code from 0 to 15, the 16-bit word that holds its bits, as a signed number.

    places: bit of the word for each bit of a code, the highest first.
    """
    bits = [
        sum((code >> 3 - at & 1) << place for at, place in enumerate(places)) for code in range(16)
    ]
    return [each - (each >> 15 << 16) for each in bits]
