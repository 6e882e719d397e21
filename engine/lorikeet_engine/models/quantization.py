"""Which format a checkpoint's linears are in, as config.json says."""

from collections.abc import Mapping
from typing import Any

from lorikeet_engine.adapter_format.base_config import refusal
from lorikeet_engine.errors import ModelError
from lorikeet_engine.models.int4 import Int4, Packing
from lorikeet_engine.models.nf4 import Nf4
from lorikeet_engine.models.weight_format import WeightFormat

_FIELD = "quantization_config"
_METHODS = "bitsandbytes (NF4), awq or gptq (4 bits), or a checkpoint that is not quantized"


def weight_format(raw: Mapping[str, Any]) -> WeightFormat | None:
    """What config.json says of its linears; None where they are floats.

    Raises ModelError, whose `field` is the key at fault, for what is not supported.
    """
    config = raw.get(_FIELD)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if method == "bitsandbytes":
        _require(config, "load_in_4bit", True)
        _require(config, "bnb_4bit_quant_type", "nf4")
        return Nf4()
    if method not in ("awq", "gptq"):
        raise _refusal("quant_method", method, _METHODS)
    _require(config, "bits", 4)
    group = config.get("group_size")
    if group == -1:
        group = 0
    elif not isinstance(group, int) or group < 1:
        raise _refusal("group_size", group, "a positive integer, or -1 for all inputs")
    if method == "awq":
        _require(config, "version", "gemm")
        _require(config, "zero_point", True)
        return Int4(Packing.AWQ, group)
    kind = config.get("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise _refusal("checkpoint_format", kind, "gptq or gptq_v2")
    return Int4(Packing(kind), group)


def _require(config: Mapping[str, Any], key: str, want: object) -> None:
    value = config.get(key)
    if isinstance(value, str):
        value = value.lower()
    if value != want:
        raise _refusal(key, config.get(key), f"{want!r}, or a checkpoint that is not quantized")


def _refusal(key: str, value: object, want: str) -> ModelError:
    return refusal(f"{_FIELD}.{key}", value, want)
