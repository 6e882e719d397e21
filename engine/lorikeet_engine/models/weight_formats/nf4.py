"""NF4, the 4-bit format of QLoRA (Dettmers et al. 2023, §3 and appendix E), as in bitsandbytes.

A matrix is a sequence of blocks of 64 weights. A weight is the nearest of 16 levels times its
block's largest magnitude (absmax). Double quantisation subtracts the mean from these magnitudes and
stores them in 8 bits, in blocks of 256 with a float32 magnitude each.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.w4a16 import PackedWeight, pack
from lorikeet_engine.models.weight_formats.protocol import PartReader, not_packed

_BLOCK = 64
_MAGNITUDES_BLOCK = 256
_STATE = ".quant_state.bitsandbytes__nf4"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Quantiles of a normal distribution, scaled to [-1, 1]: QLoRA, appendix E.
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Nf4:
    """Reader of NF4 linears as bitsandbytes saves them: two codes in a byte, high half first."""

    marks: ClassVar[tuple[str, ...]] = (f".weight{_STATE}",)

    def dequantize(self, weight: str, shape: Sequence[int], parts: PartReader) -> torch.Tensor:
        """Return an NF4 weight's values [d_out, d_in], in its dtype before quantisation.

        The values equal the values that bitsandbytes computes. Raises ModelError if a tensor is
        missing or malformed.

        weight: name of the weight.
        shape: (d_out, d_in).
        parts: reader of the stored tensors.
        """
        d_out, d_in = shape
        found = _read(weight, d_out, d_in, parts)
        values = _blockwise(found.levels, found.codes, found.magnitudes, found.state.blocksize)
        return values.to(found.state.dtype).view(d_out, d_in)

    def pack(self, weight: str, shape: Sequence[int], parts: PartReader) -> PackedWeight:
        """Return an NF4 weight packed for the kernels, with its blocks' magnitudes (largest
        absolute values) in float32.

        The values equal `dequantize`'s. Raises ModelError if a tensor is missing or malformed, or
        if rows do not consist of whole blocks.

        weight: name of the weight.
        shape: (d_out, d_in).
        parts: reader of the stored tensors.
        """
        d_out, d_in = shape
        found = _read(weight, d_out, d_in, parts)
        try:
            if d_in % found.state.blocksize:
                raise ValueError(f"its {d_in} inputs are no whole blocks of 64")
            return pack(
                found.codes.view(d_out, d_in),
                found.magnitudes.view(d_out, -1),
                None,
                levels=found.levels,
                rounded=found.state.dtype,
            )
        except ValueError as error:
            raise not_packed(weight, error) from error


@dataclass(frozen=True, slots=True)
class _Codes:
    """NF4 weight as stored.

    codes: in the order of the weight's rows, uint8.
    levels: value of each code, before the factor of its block.
    magnitudes: factor of each block of codes.
    """

    state: "_State"
    codes: torch.Tensor
    levels: torch.Tensor
    magnitudes: torch.Tensor


def _read(weight: str, d_out: int, d_in: int, parts: PartReader) -> _Codes:
    state = _State.parse(weight + _STATE, parts.stored_bytes(weight + _STATE))
    if state.shape != (d_out, d_in):
        raise ModelError(
            f"{weight} is NF4 of {list(state.shape)}: want {[d_out, d_in]}", field=weight
        )
    blocks = math.ceil(d_out * d_in / state.blocksize)
    packed = parts.part(weight, "U8", math.ceil(d_out * d_in / 2), 1).view(-1)
    levels = parts.part(f"{weight}.quant_map", "F32", 16)
    if state.nested_blocksize:
        nested = math.ceil(blocks / state.nested_blocksize)
        magnitudes = _blockwise(
            parts.part(f"{weight}.nested_quant_map", "F32", 256),
            parts.part(f"{weight}.absmax", "U8", blocks),
            parts.part(f"{weight}.nested_absmax", "F32", nested),
            state.nested_blocksize,
        )
        magnitudes += state.nested_offset
    else:
        magnitudes = parts.part(f"{weight}.absmax", "F32", blocks)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[: d_out * d_in]
    return _Codes(state, codes, levels, magnitudes)


@dataclass(frozen=True, slots=True)
class _State:
    """Quantisation state that bitsandbytes stores as JSON with each weight.

    nested_blocksize: number of magnitudes in a block of double quantisation; 0: the magnitudes are
        stored as floats.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocksize: int
    nested_blocksize: int
    nested_offset: float

    @classmethod
    def parse(cls, name: str, text: bytes) -> "_State":
        try:
            raw = json.loads(text)
            return cls(
                shape=tuple(raw["shape"]),
                dtype=_DTYPES[raw["dtype"]],
                blocksize=int(raw["blocksize"]),
                nested_blocksize=int(raw.get("nested_blocksize", 0)),
                nested_offset=float(raw.get("nested_offset", 0.0)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{name} cannot be read as bitsandbytes' state of NF4 weights: {error!r}",
                field=name,
            ) from error


def round_to_nf4(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight after rounding to NF4 and back, in blocks of 64 with double quantisation.

    weight [d_out, d_in], any float dtype → the same shape and dtype.
    """
    flat = weight.float().view(-1)
    levels = torch.tensor(_LEVELS, device=weight.device)
    codes, magnitudes = _nearest(flat, levels, _BLOCK)
    mean = magnitudes.mean()
    table = _eight_bit_levels().to(weight.device)
    nested, nested_magnitudes = _nearest(magnitudes - mean, table, _MAGNITUDES_BLOCK)
    magnitudes = _blockwise(table, nested, nested_magnitudes, _MAGNITUDES_BLOCK) + mean
    return _blockwise(levels, codes, magnitudes, _BLOCK).to(weight.dtype).view_as(weight)


def _blockwise(
    levels: torch.Tensor, codes: torch.Tensor, magnitudes: torch.Tensor, block: int
) -> torch.Tensor:
    """Return levels[codes] in float32, each block of `block` codes times its magnitude."""
    return levels[codes.long()] * magnitudes.repeat_interleave(block)[: len(codes)]


def _nearest(
    values: torch.Tensor, levels: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise values in blocks, each value relative to the largest magnitude of its block.

    block: number of values in a block.
    → index in `levels` of the level nearest to each value, int64 [values]
    → largest magnitude of each block [blocks]
    """
    padded = F.pad(values, (0, -len(values) % block)).view(-1, block)
    magnitudes = padded.abs().amax(dim=1)
    scaled = (padded * (1 / magnitudes.clamp(min=1e-38))[:, None]).clamp(-1, 1).view(-1)
    return torch.bucketize(scaled[: len(values)], (levels[:-1] + levels[1:]) / 2), magnitudes


def _eight_bit_levels() -> torch.Tensor:
    """Return the 256 levels of the dynamic tree data type (Dettmers 2015, arXiv 1511.04561).

    For the decades from 1e-6 to 1, the range from a tenth of the decade to the decade is cut into
    1, 2, 4 … 64 equal parts, whose midpoints are levels, with both signs. 0 and 1 are levels too.
    Levels are in ascending order.
    """
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        positive.append(10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2)
    tens = torch.cat(positive)
    return torch.cat([tens, -tens, torch.tensor([0.0, 1.0])]).sort().values
