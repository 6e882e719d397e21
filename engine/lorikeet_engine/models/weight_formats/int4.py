"""4-bit integers of AWQ, GPTQ and compressed-tensors: w = scale · (q − zero).

Groups of inputs share scale and zero.

AWQ: Lin et al. 2024 (arXiv 2306.00978), stored as AutoAWQ's "gemm" version stores it. GPTQ:
Frantar et al. 2023 (arXiv 2210.17323), stored as AutoGPTQ and GPTQModel store it. W4A16: as
compressed-tensors stores its schemes W4A16 and W4A16_ASYM ("pack-quantized").
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lorikeet_engine.adapter_format import Quantization, QuantizedLinears
from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.w4a16 import MIDDLE, PackedWeight, pack
from lorikeet_engine.models.weight_formats.protocol import PartReader, not_packed

_PER_INTEGER = 8  # of 32 bits
_ONES = 0x11111111  # 1 in each nibble
_MARKS = {Quantization.W4A16: ".weight_packed"}
# Columns of an integer's nibbles, in an order that suits AutoAWQ's kernels, which unpack two halves
# at once.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class _Integers:
    """Numbers of a 4-bit weight, before groups of inputs are put side by side.

    q [d_out, d_in] uint8; scales [d_out, groups]; zeros [d_out, groups] uint8; None: 8 everywhere.
    group_of [d_in]: group of each input.
    """

    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of: torch.Tensor


@dataclass(frozen=True, slots=True)
class Int4:
    """Reader of linears of 4-bit integers, eight packed in 32 bits.

    AWQ packs eight outputs of one input, in the order _AWQ_COLUMNS; GPTQ and compressed-tensors
    pack eight inputs of one output.
    """

    stored: QuantizedLinears

    @property
    def marks(self) -> tuple[str, ...]:
        """Suffixes by which a linear of this format is recognised: the checkpoint has a tensor
        whose name is the linear's path plus the suffix.
        """
        return (_MARKS.get(self.stored.format, ".qweight"),)

    def dequantize(self, weight: str, shape: Sequence[int], parts: PartReader) -> torch.Tensor:
        """Return a 4-bit weight's values [d_out, d_in], rounded to the dtype of its scales.

        Raises ModelError if a tensor is missing or malformed, or if the weight cannot be cut into
        the format's groups.

        weight: name of the weight.
        shape: (d_out, d_in).
        parts: reader of the stored tensors.
        """
        found = self._integers(weight, shape, parts)
        zeros = MIDDLE if found.zeros is None else found.zeros.float()[:, found.group_of]
        # exact in float32, so rounded once, as a product in the scales' dtype would be
        product = found.scales.float()[:, found.group_of] * (found.q.float() - zeros)
        return product.to(found.scales.dtype)

    def pack(self, weight: str, shape: Sequence[int], parts: PartReader) -> PackedWeight:
        """Return a 4-bit weight packed for the kernels, with its exact values.

        Raises ModelError if a tensor is missing or malformed, or if the groups are not of the sizes
        that the format and the kernels need.

        weight: name of the weight.
        shape: (d_out, d_in).
        parts: reader of the stored tensors.
        """
        found = self._integers(weight, shape, parts)
        try:
            return pack(found.q, found.scales, found.zeros, found.group_of)
        except ValueError as error:
            raise not_packed(weight, error) from error

    def _integers(self, weight: str, shape: Sequence[int], parts: PartReader) -> _Integers:
        d_out, d_in = shape
        path, group = weight.removesuffix(".weight"), self.stored.group or d_in
        if d_out % _PER_INTEGER or d_in % group or group % _PER_INTEGER:
            raise ModelError(
                f"{weight} [{d_out}, {d_in}] cannot be cut into groups of {group} inputs and "
                f"integers of {_PER_INTEGER} weights: want a copy that is not quantised",
                field="quantization_config",
            )
        groups = d_in // group
        match self.stored.format:
            case Quantization.AWQ:
                return _awq(path, d_out, d_in, groups, parts)
            case Quantization.GPTQ:
                ones = _ONES * self.stored.zeros_less_one
                return _gptq(path, d_out, d_in, groups, ones, parts)
            case _:
                return _pack_quantized(path, d_out, d_in, groups, parts)


def _awq(path: str, d_out: int, d_in: int, groups: int, parts: PartReader) -> _Integers:
    scales = parts.scales(f"{path}.scales", (groups, d_out))
    zeros = parts.part(f"{path}.qzeros", "I32", groups, d_out // _PER_INTEGER)
    q = parts.part(f"{path}.qweight", "I32", d_in, d_out // _PER_INTEGER)
    group_of = _neighbours(d_in, groups, scales.device)
    return _Integers(_awq_columns(q).t(), scales.t(), _awq_columns(zeros).t(), group_of)


def _gptq(path: str, d_out: int, d_in: int, groups: int, ones: int, parts: PartReader) -> _Integers:
    scales = parts.scales(f"{path}.scales", (groups, d_out))
    packed = parts.part(f"{path}.qweight", "I32", d_in // _PER_INTEGER, d_out)
    # Stored less one, by a subtraction from the whole integer: for a zero point of 0 GPTQModel
    # borrows from the next nibble. The addition undoes both.
    zeros = parts.part(f"{path}.qzeros", "I32", groups, d_out // _PER_INTEGER) + ones
    group_of = _group_of(f"{path}.g_idx", d_in, groups, parts)
    return _Integers(_nibbles(packed.t()), scales.t(), _nibbles(zeros).t(), group_of)


def _pack_quantized(path: str, d_out: int, d_in: int, groups: int, parts: PartReader) -> _Integers:
    """Read a linear of compressed-tensors, whose integers are stored plus 8.

    path: name of the linear.
    groups: number of groups of inputs.
    """
    parts.part(f"{path}.weight_shape", "I64", 2)
    scales = parts.scales(f"{path}.weight_scale", (d_out, groups))
    q = _nibbles(parts.part(f"{path}.weight_packed", "I32", d_out, d_in // _PER_INTEGER))
    zeros, order = None, f"{path}.weight_g_idx"
    if f"{path}.weight_zero_point" in parts:
        packed = parts.part(f"{path}.weight_zero_point", "I32", d_out // _PER_INTEGER, groups)
        zeros = _nibbles(packed.t()).t()
    group_of = _neighbours(d_in, groups, scales.device)
    if order in parts:  # written until compressed-tensors 0.18, for actorder=group
        stored = parts.part(order, "I32", d_in)
        if stored.is_meta or not bool((stored == -1).any()):  # -1: initialised, never set
            group_of = _group_of(order, d_in, groups, parts)
    return _Integers(q, scales, zeros, group_of)


def _neighbours(d_in: int, groups: int, device: torch.device) -> torch.Tensor:
    return torch.arange(d_in, device=device) // (d_in // groups)


def _group_of(name: str, d_in: int, groups: int, parts: PartReader) -> torch.Tensor:
    """Read the group of each input of a linear → [d_in]. Inputs of a group share their scales.

    With desc_act or actorder=group, groups are not in the order of inputs.

    name: name of the tensor of groups.
    groups: number of groups.
    """
    group_of = parts.part(name, "I32", d_in).long()
    if not group_of.is_meta and bool(((group_of < 0) | (group_of >= groups)).any()):
        raise ModelError(
            f"{name} names groups that are not there: want 0 to {groups - 1}", field=name
        )
    return group_of


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack 4-bit integers, lowest bits first.

    packed [rows, columns] int32 → [rows, 8 · columns] uint8
    """
    halves = packed.contiguous().view(torch.uint8)  # the lowest byte first
    return torch.stack([halves & 15, halves >> 4], -1).flatten(1)


def _awq_columns(packed: torch.Tensor) -> torch.Tensor:
    """Unpack AWQ's 4-bit integers: [rows, columns / 8] int32 → [rows, columns] uint8."""
    nibbles = _nibbles(packed).view(len(packed), -1, _PER_INTEGER)
    out = torch.empty_like(nibbles)
    out[..., list(_AWQ_COLUMNS)] = nibbles
    return out.flatten(1)
