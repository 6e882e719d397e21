"""MLX's LoRA folders, as PEFT's tensors and config.

`mlx_lm.lora` saves adapters.safetensors with lora_a [d_in, rank] and lora_b [rank, d_out] for each
linear, and its whole command line as adapter_config.json. The delta is scale · x · lora_a · lora_b
(mlx-lm 0.32, tuner/lora.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorikeet_engine.adapter_format.expressions import bad_config
from lorikeet_engine.adapter_format.saved_weights import SavedTensor, tensors_of
from lorikeet_engine.adapter_format.tensor_names import tensor_name

MLX_WEIGHTS_FILE = "adapters.safetensors"
_SIDES = {"lora_a": "A", "lora_b": "B"}


def is_mlx(folder: Path) -> bool:
    """Whether MLX saved an adapter there."""
    return (folder / MLX_WEIGHTS_FILE).is_file()


def mlx_tensors(folder: Path) -> dict[str, SavedTensor]:
    """PEFT's tensors by name. Raises AdapterRejected."""
    tensors = {}
    for name, tensor in tensors_of([folder / MLX_WEIGHTS_FILE]).items():
        module, _, side = name.rpartition(".")
        if side in _SIDES:
            tensors[tensor_name(module, _SIDES[side])] = tensor.transpose()
        else:
            tensors[name] = tensor  # to be refused by its name
    return tensors


def peft_config(raw: Mapping[str, Any]) -> dict[str, object]:
    """PEFT's config for what MLX's says. Raises AdapterRejected."""
    kind, given = raw.get("fine_tune_type", "lora"), raw.get("lora_parameters")
    if kind != "lora":
        raise bad_config(f"{kind!r}: only lora can be served", "fine_tune_type")
    if not isinstance(given, Mapping) or not {"rank", "scale"} <= set(given):
        raise bad_config("want rank and scale, as mlx_lm.lora writes them", "lora_parameters")
    if "alpha" in given:
        raise bad_config(
            "alpha: what it means depends on mlx-lm's version; fold it into scale and remove it",
            "lora_parameters",
        )
    rank, scale = given["rank"], given["scale"]
    if type(rank) is not int or type(scale) not in (int, float):
        raise bad_config("want numbers as rank and scale", "lora_parameters")
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": raw.get("model") or "",
        "r": rank,
        "lora_alpha": float(scale * rank),
    }
