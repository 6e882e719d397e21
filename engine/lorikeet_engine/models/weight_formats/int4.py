"""AWQ's and GPTQ's 4-bit integers: w = scale · (q − zero), which a group of inputs shares.

AWQ: Lin et al. 2024 (arXiv 2306.00978), stored as AutoAWQ's "gemm" version stores it. GPTQ:
Frantar et al. 2023 (arXiv 2210.17323), stored as AutoGPTQ and GPTQModel store it.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from lorikeet_engine.adapter_format import Quantization, QuantizedLinears
from lorikeet_engine.errors import ModelError
from lorikeet_engine.models.weight_formats.protocol import PartReader

_PER_INTEGER = 8  # of 32 bits
# AutoAWQ's kernels unpack two halves of an integer at once: these are the columns of its nibbles.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Int4:
    """Linears of 4-bit integers, eight in one of 32 bits.

    In AWQ's these are eight outputs of one input, in an order of their own; in GPTQ's eight inputs
    of one output.
    """

    stored: QuantizedLinears

    def holds(self, weight: str, stored: Collection[str]) -> bool:
        """Whether a weight is stored in this format, by the names of all tensors."""
        return f"{weight.removesuffix('.weight')}.qweight" in stored

    def dequantize(self, weight: str, d_out: int, d_in: int, parts: PartReader) -> torch.Tensor:
        """The weight [d_out, d_in] in float16, the format's dtype. Raises ModelError."""
        path, group = weight.removesuffix(".weight"), self.stored.group or d_in
        if d_out % _PER_INTEGER or d_in % group or group % _PER_INTEGER:
            raise ModelError(
                f"{weight} [{d_out}, {d_in}] cannot be cut into groups of {group} inputs and "
                f"integers of {_PER_INTEGER} weights",
                field=weight,
            )
        groups = d_in // group
        scales = parts.part(f"{path}.scales", "F16", groups, d_out)
        packed_zeros = parts.part(f"{path}.qzeros", "I32", groups, d_out // _PER_INTEGER)
        if self.stored.format is Quantization.AWQ:
            packed = parts.part(f"{path}.qweight", "I32", d_in, d_out // _PER_INTEGER)
            levels, zeros = _awq_columns(packed), _awq_columns(packed_zeros)
        else:
            packed = parts.part(f"{path}.qweight", "I32", d_in // _PER_INTEGER, d_out)
            levels = _nibbles(packed).transpose(1, 2).reshape(d_in, d_out)
            zeros = _nibbles(packed_zeros).flatten(1) + self.stored.zeros_less_one
        if self.stored.format is Quantization.AWQ:
            group_of = torch.arange(d_in, device=scales.device) // group
        else:  # with desc_act, inputs were dealt to groups by their weight
            group_of = parts.part(f"{path}.g_idx", "I32", d_in).long()
        # exact in float32, so rounded once, as float16's own product is
        product = scales.float()[group_of] * (levels - zeros[group_of])
        return product.half().t()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[rows, columns] int32 to [rows, columns, 8] int32, the lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return (packed[..., None] >> shifts) & 15


def _awq_columns(packed: torch.Tensor) -> torch.Tensor:
    """[rows, columns / 8] int32 to [rows, columns] int32."""
    nibbles = _nibbles(packed)
    out = torch.empty_like(nibbles)
    out[..., list(_AWQ_COLUMNS)] = nibbles
    return out.flatten(1)
