"""Reads a base model's config.json; each value is checked by the function that reads it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorikeet_engine.adapter_format.families import (
    FAMILIES,
    TEXT_DECODERS,
    VARIANTS,
    VISION_LANGUAGE,
)
from lorikeet_engine.errors import ModelError

# Keys of the text part that a vision-language model's file has outside of text_config.
_OUTSIDE = (
    *("_name_or_path", "compression_config", "dtype", "eos_token_id", "quantization_config"),
    *("tie_word_embeddings", "torch_dtype"),
)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file in a base model's folder.

    Raises ModelError, whose `field` is the file's name, if the file cannot be read or does not hold
    a JSON object.
    """
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist: want a folder with a Hugging Face checkpoint", field=path.name
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}", field=path.name) from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds no JSON object", field=path.name)
    return raw


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read the config of the text decoder from config.json in a base model's folder.

    Raises ModelError if a config file cannot be read, or holds no JSON object.
    """
    raw = read_json(folder / "config.json")
    # ModelOpt first wrote only this file, and later quantization_config, too
    alone = folder / "hf_quant_config.json"
    if raw.get("quantization_config") is None and alone.exists():
        said = read_json(alone).get("quantization")
        said = said if isinstance(said, Mapping) else {}
        raw["quantization_config"] = {"quant_method": "modelopt", **said}
    return decoder_config(raw)


def is_vision_language(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of one of the vision-language models that are served, as models of
    text.
    """
    return raw.get("model_type") in VISION_LANGUAGE


def decoder_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text decoder's config, which is nested in a vision-language model's config.json.

    raw: content of config.json; returned unchanged for a model of text alone.

    Raises ModelError if text_config is not an object.
    """
    if not is_vision_language(raw):
        return _variant(raw)
    text = raw.get("text_config", {**raw, "model_type": f"{raw['model_type']}_text"})
    if not isinstance(text, Mapping):
        raise refusal("text_config", text, "an object")
    outside = {key: raw[key] for key in _OUTSIDE if raw.get(key) is not None}
    config = {**text, **outside}
    decoder = TEXT_DECODERS.get(str(config.get("model_type")))
    if decoder is None:
        return config
    config = {key: value for key, value in config.items() if key not in decoder.unread}
    return _variant({**decoder.defaults, **config, "model_type": decoder.family})


def _variant(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a decoder's config, with another model_type if a switch makes it another family.

    Gemma 4 with enable_moe_block is such a family (VARIANTS).

    Raises ModelError if such a switch has a value of another type than its default, or if several
    switches name a family.
    """
    model_type, found = str(config.get("model_type")), dict[str, str]()
    for (switch, has_value), family in VARIANTS.get(model_type, {}).items():
        default = FAMILIES[model_type].switches[switch]
        value = config.get(switch, default)
        if value is not None and type(value) is not type(default):
            want = "true or false" if isinstance(default, bool) else "a number, or 0"
            raise refusal(switch, value, want)
        if bool(value) is has_value and found:
            raise refusal(switch, value, f"{type(default)()!r} beside {', '.join(found)}")
        if bool(value) is has_value:
            found[switch] = family
    return {**config, "model_type": next(iter(found.values()))} if found else config


def integer(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """Return the positive integer under the key `field` of a config.

    Raises ModelError for any other value.

    default: value to assume if the config has none.
    """
    value = raw.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refusal(field, value, "a positive integer")
    return value


def number(raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """Return the positive number under the key `field` of a config.

    Raises ModelError for any other value.

    default: value to assume if the config has none.
    """
    value = raw.get(field)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise refusal(field, value, "a positive number")
    return float(value)


def numbers(raw: Mapping[str, Any], field: str, count: int) -> tuple[float, ...]:
    """Return the list of `count` positive numbers under the key `field` of a config.

    Raises ModelError for any other value.
    """
    value = raw.get(field)
    if not isinstance(value, list) or len(value) != count:
        raise refusal(field, value, f"a list of {count} positive numbers")
    return tuple(number({field: each}, field) for each in value)


def flag(raw: Mapping[str, Any], field: str, *, default: bool = False) -> bool:
    """Return the boolean under the key `field` of a config.

    Raises ModelError for any other value.

    default: value to assume if the config has none.
    """
    value = raw.get(field)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise refusal(field, value, "true or false")
    return value


def refusal(field: str, value: object, want: str) -> ModelError:
    """Return the error for a value in config.json that cannot be served.

    field: the value's key, which becomes the error's `field`.
    want: values that could be served, in words.
    """
    return ModelError(f"config.json: {field}={value!r}: want {want}", field=field)
