"""In which format a base model's linears are quantised: what config.json says. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lorikeet_engine.adapter_format.base_config import refusal
from lorikeet_engine.errors import ModelError

_FIELD = "quantization_config"


class Quantization(StrEnum):
    """A format of quantised linears; its value is what people call it."""

    FP8 = "fp8"
    NF4 = "nf4"
    AWQ = "awq"
    GPTQ = "gptq"


@dataclass(frozen=True, slots=True)
class QuantizedLinears:
    """How a checkpoint stores its linears.

    group: inputs that share a scale, of AWQ and GPTQ; 0: all of them. zeros_less_one: GPTQ's first
    version stores zero points so. scales: FP8's, the name of their tensor beside "weight". block:
    rows and columns that share one of them; None: each row has one, or the matrix.
    """

    format: Quantization
    group: int = 0
    zeros_less_one: bool = False
    scales: str = ""
    block: tuple[int, int] | None = None


def quantized_linears(raw: Mapping[str, Any]) -> QuantizedLinears | None:
    """Read a config.json; None where its linears are floats.

    Raises ModelError, whose `field` is the key at fault, for what is not supported.
    """
    config = raw.get(_FIELD)
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise _refusal("quant_method", config, "an object")
    method = config.get("quant_method")
    if method == "bitsandbytes":
        _require(config, "load_in_4bit", True)
        _require(config, "bnb_4bit_quant_type", "nf4")
        return QuantizedLinears(Quantization.NF4)
    if method == "fp8":
        return _fp8(config)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method not in ("awq", "gptq"):
        raise _refusal(
            "quant_method",
            method,
            "fp8, compressed-tensors (FP8), bitsandbytes (NF4), or awq or gptq of 4 bits",
        )
    _require(config, "bits", 4)
    group = _group(config)
    if method == "awq":
        _require(config, "version", "gemm")
        _require(config, "zero_point", True)
        return QuantizedLinears(Quantization.AWQ, group)
    kind = config.get("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise _refusal("checkpoint_format", kind, "gptq or gptq_v2")
    return QuantizedLinears(Quantization.GPTQ, group, zeros_less_one=kind == "gptq")


def _fp8(config: Mapping[str, Any]) -> QuantizedLinears:
    """DeepSeek's blocks (transformers' FineGrainedFP8Config), or AutoFP8's scale of a matrix."""
    _require(config, "fmt", "e4m3", absent="e4m3")
    if config.get("weight_block_size") is None:
        return QuantizedLinears(Quantization.FP8, scales="weight_scale")
    block = _block(config, "weight_block_size")
    return QuantizedLinears(Quantization.FP8, scales="weight_scale_inv", block=block)


def _compressed_tensors(config: Mapping[str, Any]) -> QuantizedLinears:
    """Schemes FP8, FP8_DYNAMIC and FP8_BLOCK, one of them for all that is quantised."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refusal("config_groups", groups, "one group, of FP8")
    (group,) = groups.values()
    for part in ("weights", "input_activations"):
        found = (group.get(part) if isinstance(group, Mapping) else None) or {}
        if (found.get("num_bits"), found.get("type")) != (8, "float"):
            raise _refusal(f"config_groups.{part}", found, "floats of 8 bits")
    weights = group["weights"]
    _require(weights, "symmetric", True, absent=True)
    if weights.get("strategy") == "block":
        block = _block(weights, "block_structure")
        return QuantizedLinears(Quantization.FP8, scales="weight_scale", block=block)
    if weights.get("strategy") not in ("channel", "tensor"):
        raise _refusal("strategy", weights.get("strategy"), "channel, tensor or block")
    return QuantizedLinears(Quantization.FP8, scales="weight_scale")


def _block(config: Mapping[str, Any], key: str) -> tuple[int, int]:
    match config.get(key):
        case [int(high), int(wide)] if min(high, wide) > 0:
            return high, wide
        case other:
            raise _refusal(key, other, "rows and columns of a block, such as [128, 128]")


def served_quantization(stored: QuantizedLinears | None, weight_dtype: str) -> str | None:
    """What the values of served linears were rounded to, in words; None: to nothing.

    stored: of the checkpoint. weight_dtype: EngineSettings', which may round while loading.
    """
    held = stored.format.value if stored else None
    rounded = None if weight_dtype in ("auto", held) else f"rounded to {weight_dtype}"
    return ", ".join(filter(None, (held, rounded))) or None


def is_nf4(quantization: str | None) -> bool:
    """Whether served_quantization says that the values are, or were before FP8, those of NF4."""
    return quantization is not None and Quantization.NF4.value in quantization


def _group(config: Mapping[str, Any]) -> int:
    group = config.get("group_size")
    if group == -1:
        return 0
    if not isinstance(group, int) or group < 1:
        raise _refusal("group_size", group, "a positive integer, or -1 for all inputs")
    return group


def _require(config: Mapping[str, Any], key: str, want: object, absent: object = None) -> None:
    """Refuse a value that is another; absent: what it is where the config does not say."""
    value = config.get(key, absent)
    if (value.lower() if isinstance(value, str) else value) != want:
        raise _refusal(key, value, repr(want))


def _refusal(key: str, value: object, want: str) -> ModelError:
    return refusal(f"{_FIELD}.{key}", value, f"{want}; or take a copy that is not quantised")
