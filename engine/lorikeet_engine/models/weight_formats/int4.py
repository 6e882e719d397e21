"""AWQ's and GPTQ's 4-bit integers: w = scale · (q − zero).

Groups of inputs share scale and zero.

AWQ: Lin et al. 2024 (arXiv 2306.00978), stored as AutoAWQ's "gemm" version stores it. GPTQ:
Frantar et al. 2023 (arXiv 2210.17323), stored as AutoGPTQ and GPTQModel store it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from lorikeet_engine.adapter_format import Quantization, QuantizedLinears
from lorikeet_engine.errors import ModelError
from lorikeet_engine.models.weight_formats.protocol import PartReader

_PER_INTEGER = 8  # of 32 bits
_ONES = 0x11111111  # 1 in each nibble
# Columns of an integer's nibbles, in an order that suits AutoAWQ's kernels, which unpack two halves
# at once.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Int4:
    """Reader of linears of 4-bit integers, eight packed in 32 bits.

    AWQ packs eight outputs of one input, in the order _AWQ_COLUMNS; GPTQ packs eight inputs of one
    output.
    """

    stored: QuantizedLinears
    marks: ClassVar[tuple[str, ...]] = (".qweight",)

    def dequantize(self, weight: str, shape: Sequence[int], parts: PartReader) -> torch.Tensor:
        """Return a 4-bit weight's values [d_out, d_in] in the dtype of its scales.

        Raises ModelError if a tensor is missing or malformed, or if the weight cannot be cut into
        the format's groups.

        weight: name of the weight.
        shape: (d_out, d_in).
        parts: reader of the stored tensors.
        """
        d_out, d_in = shape
        path, group = weight.removesuffix(".weight"), self.stored.group or d_in
        if d_out % _PER_INTEGER or d_in % group or group % _PER_INTEGER:
            raise ModelError(
                f"{weight} [{d_out}, {d_in}] cannot be cut into groups of {group} inputs and "
                f"integers of {_PER_INTEGER} weights: want a copy that is not quantised",
                field=weight,
            )
        groups = d_in // group
        scales = parts.scales(f"{path}.scales", (groups, d_out))
        packed_zeros = parts.part(f"{path}.qzeros", "I32", groups, d_out // _PER_INTEGER)
        if self.stored.format is Quantization.AWQ:
            packed = parts.part(f"{path}.qweight", "I32", d_in, d_out // _PER_INTEGER)
            levels, zeros = _awq_columns(packed), _awq_columns(packed_zeros)
            group_of = torch.arange(d_in, device=scales.device) // group
        else:
            packed = parts.part(f"{path}.qweight", "I32", d_in // _PER_INTEGER, d_out)
            levels = _nibbles(packed).transpose(1, 2).reshape(d_in, d_out)
            # Stored less one, by a subtraction from the whole integer: for a zero point of 0
            # GPTQModel borrows from the next nibble. The addition undoes both.
            zeros = _nibbles(packed_zeros + _ONES * self.stored.zeros_less_one).flatten(1)
            group_of = _group_of(f"{path}.g_idx", d_in, groups, parts)
        # exact in float32, so rounded once, as a product in the scales' dtype would be
        product = scales.float()[group_of] * (levels - zeros[group_of])
        return product.to(scales.dtype).t()


def _group_of(name: str, d_in: int, groups: int, parts: PartReader) -> torch.Tensor:
    """Read the group of each input of a GPTQ linear → [d_in]. Inputs of a group share their scales.

    With desc_act, groups are not in the order of inputs.
    """
    group_of = parts.part(name, "I32", d_in).long()
    if not group_of.is_meta and bool(((group_of < 0) | (group_of >= groups)).any()):
        raise ModelError(
            f"{name} names groups that are not there: want 0 to {groups - 1}", field=name
        )
    return group_of


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack 4-bit integers, lowest bits first: int32 [rows, columns] → [rows, columns, 8]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return (packed[..., None] >> shifts) & 15


def _awq_columns(packed: torch.Tensor) -> torch.Tensor:
    """Unpack AWQ's 4-bit integers: [rows, columns / 8] int32 → [rows, columns] int32."""
    nibbles = _nibbles(packed)
    out = torch.empty_like(nibbles)
    out[..., list(_AWQ_COLUMNS)] = nibbles
    return out.flatten(1)
