"""Formats in which checkpoints store quantised linears, and their readers."""

from collections.abc import Iterable

from lorikeet_engine.adapter_format import Quantization, QuantizedLinears
from lorikeet_engine.errors import ModelError
from lorikeet_engine.models.weight_formats.fp8 import Fp8
from lorikeet_engine.models.weight_formats.int4 import Int4
from lorikeet_engine.models.weight_formats.mxfp4 import Mxfp4
from lorikeet_engine.models.weight_formats.nf4 import Nf4
from lorikeet_engine.models.weight_formats.protocol import WeightFormat


def weight_format(stored: QuantizedLinears, names: Iterable[str]) -> WeightFormat:
    """Choose the reader of the format in which a checkpoint's linears are quantised.

    Raises ModelError if no linear is stored in this format.

    stored: format that config.json names.
    names: names of all tensors in the checkpoint.
    """
    found = _format(stored)
    if not any(name.endswith(found.marks) for name in names):
        raise ModelError(
            f"config.json: quantization_config is of {stored.format}, and no linear is stored so: "
            "take it out of config.json if the weights are floats, or take a whole copy",
            field="quantization_config.quant_method",
        )
    return found


def _format(stored: QuantizedLinears) -> WeightFormat:
    match stored.format:
        case Quantization.FP8:
            return Fp8(stored)
        case Quantization.NF4:
            return Nf4()
        case Quantization.MXFP4:
            return Mxfp4()
        case _:
            return Int4(stored)
