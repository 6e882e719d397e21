"""How checkpoints store weights that are quantised, and how those are read."""

from lorikeet_engine.adapter_format import Quantization, QuantizedLinears
from lorikeet_engine.models.weight_formats.fp8 import Fp8
from lorikeet_engine.models.weight_formats.int4 import Int4
from lorikeet_engine.models.weight_formats.nf4 import Nf4
from lorikeet_engine.models.weight_formats.protocol import WeightFormat

__all__ = ["weight_format"]


def weight_format(stored: QuantizedLinears) -> WeightFormat:
    """What reads linears that are stored so."""
    match stored.format:
        case Quantization.FP8:
            return Fp8(stored)
        case Quantization.NF4:
            return Nf4()
        case _:
            return Int4(stored)
