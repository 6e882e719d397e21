"""Formats of a base model's quantised linears, as config.json describes them. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lorikeet_engine.adapter_format.base_config import refusal
from lorikeet_engine.errors import ModelError

_FIELD = "quantization_config"
_METHODS = (
    "fp8, compressed-tensors or modelopt (FP8), bitsandbytes (NF4), mxfp4, or awq, gptq or "
    "compressed-tensors of 4 bits"
)


class Quantization(StrEnum):
    """A format of quantised linears; the value is its usual name."""

    FP8 = "fp8"
    NF4 = "nf4"
    AWQ = "awq"
    GPTQ = "gptq"
    MXFP4 = "mxfp4"  # of gpt-oss's experts alone
    W4A16 = "w4a16"  # compressed-tensors' integers of 4 bits

    @property
    def has_4_bits(self) -> bool:
        """Whether weights have 4 bits, which weight_dtype=packed keeps."""
        return self is not Quantization.FP8


@dataclass(frozen=True, slots=True)
class QuantizedLinears:
    """Storage format of a checkpoint's quantised linears.

    group: number of inputs that share a scale, for AWQ, GPTQ and W4A16; 0 if all inputs do.
    zeros_less_one: whether zero points are stored minus one, as in GPTQ's first version.
    block: numbers of rows and columns that share a scale, for FP8; None: one scale per row or per
        matrix.
    """

    format: Quantization
    group: int = 0
    zeros_less_one: bool = False
    block: tuple[int, int] | None = None


def quantized_linears(raw: Mapping[str, Any]) -> QuantizedLinears | None:
    """Parse the quantisation in config.json; return None if the linears are stored as floats.

    Raises ModelError, whose `field` is the key at fault, for unsupported formats.

    raw: content of config.json.
    """
    # compressed-tensors up to 0.5 had a key of its own
    config = raw.get(_FIELD) or raw.get("compression_config")
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise _refusal("quant_method", config, "an object")
    match config.get("quant_method"):
        case "bitsandbytes":
            _require(config, "load_in_4bit", True)
            _require(config, "bnb_4bit_quant_type", "nf4")
            _require(config, "bnb_4bit_quant_storage", "uint8", absent="uint8")
            return QuantizedLinears(Quantization.NF4)
        case "fp8":
            return _fp8(config)
        case "mxfp4":
            return QuantizedLinears(Quantization.MXFP4)
        case "modelopt" | "compressed-tensors" if _has_kv_scales_alone(config):
            return None
        case "modelopt":
            _require(config, "quant_algo", "fp8", "fp8_per_channel_per_token")
            return QuantizedLinears(Quantization.FP8)
        case "compressed-tensors":
            return _compressed_tensors(config)
        case "awq":
            group = _group_of_4_bits(config)
            _require(config, "version", "gemm", absent=config.get("format"))
            _require(config, "zero_point", True)
            return QuantizedLinears(Quantization.AWQ, group)
        case "gptq":
            group = _group_of_4_bits(config)
            said = config.get("format", "gptq")
            version = _require(config, "checkpoint_format", "gptq", "gptq_v2", absent=said)
            return QuantizedLinears(Quantization.GPTQ, group, zeros_less_one=version == "gptq")
        case other:
            raise _refusal("quant_method", other, _METHODS)


def _fp8(config: Mapping[str, Any]) -> QuantizedLinears:
    """Parse an FP8 config: one scale per block, as in DeepSeek's models, or one per matrix.

    The config's keys for blocks are named as in transformers' FineGrainedFP8Config.
    """
    _require(config, "fmt", "e4m3", absent="e4m3")
    if config.get("weight_block_size") is None:
        return QuantizedLinears(Quantization.FP8)
    return QuantizedLinears(Quantization.FP8, block=_block(config, "weight_block_size"))


def _has_kv_scales_alone(config: Mapping[str, Any]) -> bool:
    """Whether a quantisation config is about keys and values only, not about linears."""
    return not _object(config, "config_groups") and bool(config.get("kv_cache_scheme"))


def _compressed_tensors(config: Mapping[str, Any]) -> QuantizedLinears:
    """Parse a config of compressed-tensors, of the schemes FP8, FP8_DYNAMIC, FP8_BLOCK or W4A16.

    The checkpoint's tensors show later which linears are quantised.
    """
    sparse = _object(config, "sparsity_config").get("format", "dense")
    if sparse != "dense":
        raise _refusal("sparsity_config.format", sparse, "dense")
    if online := _online_transforms(_object(config, "transform_config")):
        raise _refusal("transform_config", online, "rotations that are merged into weights")
    groups = _object(config, "config_groups")
    said = config.get("format")
    kinds = {_scheme(f"config_groups.{name}", groups[name], said) for name in groups}
    if len(kinds) != 1:
        raise _refusal(
            "config_groups",
            [*groups],
            "FP8 or W4A16, with the same blocks or groups in all of them",
        )
    return kinds.pop()


def _online_transforms(config: Mapping[str, Any]) -> list[str]:
    """Return the places of rotations (QuIP, SpinQuant) that are not merged into the weights, which
    is not supported.

    config: transform_config of compressed-tensors.
    """
    schemes = _object(config, "config_groups").values()
    places = [each["location"] for scheme in schemes for each in scheme["apply"]]
    return [place for place in places if place not in ("weight_input", "weight_output")]


def _scheme(name: str, group: Any, said: object) -> QuantizedLinears:
    """Parse one entry of compressed-tensors' config_groups.

    name: the entry's key, for errors.
    group: the entry's value.
    said: format that the config names for groups that name none.
    """
    schemes = {
        part: (group.get(part) if isinstance(group, Mapping) else None) or {}
        for part in ("weights", "input_activations")
    }
    weights = schemes["weights"]
    if (weights.get("num_bits"), weights.get("type")) == (4, "int"):
        if schemes["input_activations"]:
            raise _refusal(f"{name}.input_activations", schemes["input_activations"], "null")
        return _w4a16(name, weights, group.get("format") or said)
    for part, found in schemes.items():
        if (found.get("num_bits"), found.get("type")) != (8, "float"):
            raise _refusal(f"{name}.{part}", found, "floats of 8 bits, or W4A16")
    _require(weights, "symmetric", True, absent=True)
    if _require(weights, "strategy", "channel", "tensor", "block") == "block":
        return QuantizedLinears(Quantization.FP8, block=_block(weights, "block_structure"))
    return QuantizedLinears(Quantization.FP8)


def _w4a16(name: str, weights: Mapping[str, Any], said: object) -> QuantizedLinears:
    if said != "pack-quantized":
        raise _refusal(f"{name}.format", said, "'pack-quantized'")
    if _require(weights, "strategy", "group", "channel") == "channel":
        return QuantizedLinears(Quantization.W4A16)
    return QuantizedLinears(Quantization.W4A16, _group_size(weights))


def _block(config: Mapping[str, Any], key: str) -> tuple[int, int]:
    match config.get(key):
        case [int(high), int(wide)] if min(high, wide) > 0:
            return high, wide
        case other:
            raise _refusal(key, other, "rows and columns of a block, such as [128, 128]")


def served_quantization(stored: QuantizedLinears | None, weight_dtype: str) -> str | None:
    """Describe in words how an engine's linears are quantised; None if they are not.

    stored: storage format of the checkpoint; None if it has floats.
    weight_dtype: `weight_dtype` of EngineSettings, which may round weights while loading them.
    """
    held = stored.format.value if stored else None
    served = None if weight_dtype in ("auto", held) else f"rounded to {weight_dtype}"
    if weight_dtype == "packed":
        served = "packed"
    return ", ".join(filter(None, (held, served))) or None


def is_nf4(quantization: str | None) -> bool:
    """Whether a description by served_quantization names NF4, possibly with rounding to FP8."""
    return quantization is not None and Quantization.NF4.value in quantization


def _group_of_4_bits(config: Mapping[str, Any]) -> int:
    """Return the group size of AWQ's or GPTQ's 4-bit integers; 0 if all inputs share a scale."""
    _require(config, "bits", 4)
    _require(config, "rotation", None)  # else GPTQModel rotates the inputs of down_proj at run time
    return 0 if config.get("group_size") == -1 else _group_size(config)


def _group_size(config: Mapping[str, Any]) -> int:
    group = config.get("group_size")
    if not isinstance(group, int) or group < 1:
        raise _refusal("group_size", group, "a positive integer, or -1 for all inputs")
    return group


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key of the config; empty if it is null or missing."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise _refusal(key, value, "an object")
    return value


def _require(config: Mapping[str, Any], key: str, *wanted: object, absent: object = None) -> object:
    """Return the value under a key of the config; a string in lower case.

    Raises ModelError for a value that is not in `wanted`.

    wanted: values that are supported.
    absent: value to assume if the config has none.
    """
    value = config.get(key, absent)
    found = value.lower() if isinstance(value, str) else value
    if found not in wanted:
        raise _refusal(key, value, " or ".join(map(repr, wanted)))
    return found


def _refusal(key: str, value: object, want: str) -> ModelError:
    return refusal(f"{_FIELD}.{key}", value, f"{want}; or take a copy that is not quantised")
