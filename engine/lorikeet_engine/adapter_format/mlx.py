"""Converts LoRA folders of MLX to PEFT's tensors and config.

`mlx_lm.lora` saves adapters.safetensors, with lora_a [d_in, rank] and lora_b [rank, d_out] for each
linear, and its whole command line as adapter_config.json. The delta is scale · x · lora_a · lora_b
(mlx-lm 0.32, tuner/lora.py). Linears of experts, mlp.switch_mlp.gate_proj, up_proj and down_proj
(mlp.experts of gpt-oss), have the shapes of blobs: lora_a [experts, rank, d_in], lora_b [experts,
d_out, rank].
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorikeet_engine.adapter_format.expressions import bad_config
from lorikeet_engine.adapter_format.families import EMBEDDINGS, HEAD
from lorikeet_engine.adapter_format.saved_weights import SavedTensor, tensors_of
from lorikeet_engine.adapter_format.tensor_names import tensor_name
from lorikeet_engine.errors import AdapterRejected

MLX_WEIGHTS_FILE = "adapters.safetensors"
_SIDES = {"lora_a": "A", "lora_b": "B"}
_EXPERTS = re.compile(r"\.(?:switch_mlp|experts)\.(?=\w+$)")


def is_mlx(folder: Path) -> bool:
    """Whether a folder has an adapter in MLX's format."""
    return (folder / MLX_WEIGHTS_FILE).is_file()


def mlx_tensors(folder: Path) -> dict[str, SavedTensor]:
    """Return the tensors of an MLX folder, converted to PEFT's shapes, by PEFT's names.

    Raises AdapterRejected if the file is malformed, or adapts embed_tokens without lm_head.
    """
    tensors, adapted = {}, set()
    for name, tensor in tensors_of([folder / MLX_WEIGHTS_FILE]).items():
        module, _, side = name.rpartition(".")
        adapted.add(module.rpartition(".")[2])
        if side not in _SIDES:
            tensors[name] = tensor  # refused later, by name
        elif _EXPERTS.search(module):
            module = _EXPERTS.sub(".experts.", module)
            tensors[tensor_name(module, _SIDES[side])] = tensor
        else:
            tensors[tensor_name(module, _SIDES[side])] = tensor.transpose()
    if EMBEDDINGS.name in adapted and HEAD.name not in adapted:
        raise AdapterRejected(
            f"{EMBEDDINGS.name}: where a head is tied to the embeddings, MLX adds this to both, "
            f"and the file does not say whether it is: leave {EMBEDDINGS.name} out of "
            f"lora_parameters.keys, or add {HEAD.name}, if the base model has one of its own",
            field=EMBEDDINGS.name,
        )
    return tensors


def peft_config(raw: Mapping[str, Any]) -> dict[str, object]:
    """Convert MLX's adapter_config.json to PEFT's.

    raw: content of MLX's file.

    Raises AdapterRejected if the config is not that of a LoRA adapter, or has no usable rank and
    scale.
    """
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
