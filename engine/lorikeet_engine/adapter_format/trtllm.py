"""Converts TensorRT-LLM's pair of LoRA files to PEFT's tensors and config.

weights [modules, size]: each row is one module of one layer: A [rank, d_in], then B [d_out, rank],
flattened, then zeros. config [modules, 3]: module id, layer, rank. Both may have a first dimension
of 1. Matrices are whole, not cut for tensor parallelism.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lorikeet_engine.adapter_format.blob import Tensor
from lorikeet_engine.adapter_format.shape import BaseShape
from lorikeet_engine.adapter_format.tensor_names import tensor_name
from lorikeet_engine.errors import AdapterRejected

PAIR = ("model.lora_weights.npy", "model.lora_config.npy")
_DTYPES = {"<f4": "F32", "<f2": "F16", "|V2": "BF16"}
# Linears that a row adapts, by module id. TensorRT-LLM's gated MLP activates h_to_4h, so that is
# Hugging Face's gate_proj; its "gate" is up_proj.
_LINEARS = {
    0: ("q_proj", "k_proj", "v_proj"),
    1: ("q_proj",),
    2: ("k_proj",),
    3: ("v_proj",),
    4: ("o_proj",),
    5: ("gate_proj",),
    6: ("down_proj",),
    7: ("up_proj",),
}
_ELSEWHERE = {
    **dict.fromkeys(range(8, 13), "cross-attention, which the Llama family does not have"),
    **dict.fromkeys(range(13, 18), "experts or their router, served from PEFT's forms only"),
}


def has_trtllm_pair(folder: Path) -> bool:
    """Whether a folder has both of TensorRT-LLM's LoRA files."""
    return all((folder / name).is_file() for name in PAIR)


def read_trtllm_pair(
    folder: Path, shape: BaseShape, base_model: str, alpha: float | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert TensorRT-LLM's LoRA files in a folder: return PEFT's tensors by name, and its config.

    shape: sizes of the base model.
    base_model: name of the base model, for the config.
    alpha: alpha of the training; None: B contains the scaling already.

    Raises AdapterRejected, whose `field` is the file at fault.
    """
    weights, config = (_array(folder / name) for name in PAIR)
    if weights.dtype.str not in _DTYPES:
        raise _bad(f"holds {weights.dtype}: want float32, float16 or bfloat16", PAIR[0])
    if config.dtype.kind not in "iu" or config.shape[1:] != (3,) or len(config) != len(weights):
        raise _bad("wants a row (module id, layer, rank) for each row of the weights", PAIR[1])
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for row, (values, (kind, layer, rank)) in enumerate(zip(weights, config.tolist(), strict=True)):
        for module, a, b in _linears(row, values, kind, layer, rank, shape):
            if module in ranks:
                raise _bad(f"row {row} is for {module}, and so is one before", PAIR[1])
            ranks[module] = len(a)
            for side, matrix in (("A", a), ("B", b)):
                tensors[tensor_name(module, side)] = _DTYPES[weights.dtype.str], matrix
    return tensors, _config(ranks, base_model, alpha)


def _array(path: Path) -> np.ndarray:
    """Map a NumPy file into memory, and remove a first dimension of 1 from the array.

    Raises AdapterRejected if the file cannot be read, or if the result does not have two
    dimensions.
    """
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise _bad(f"cannot be read: {error}", path.name) from error
    if array.ndim == 3 and len(array) == 1:
        array = array[0]
    if array.ndim != 2 or not len(array):
        raise _bad(f"has the shape {list(array.shape)}: want [modules, ...]", path.name)
    return array


def _linears(
    row: int, values: np.ndarray, kind: int, layer: int, rank: int, shape: BaseShape
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the modules in one row of the weights, each with A [rank, d_in] and B [d_out, rank].

    A row of TensorRT-LLM's fused qkv has several modules.

    row: number of the row, for errors.
    values: A and B of the row, flattened.
    kind: TensorRT-LLM's module id.
    layer, rank: decoder layer and LoRA rank of the row.
    """
    if kind not in _LINEARS:
        what = _ELSEWHERE.get(kind, "no module that is known here")
        raise _bad(f"row {row} has the module id {kind}: {what}", PAIR[1])
    if not 0 <= layer < shape.layers or rank < 1:
        raise _bad(
            f"row {row} is for layer {layer} of {shape.layers} at rank {rank}: the adapter was "
            "made for another base model, or is damaged",
            PAIR[1],
        )
    linears = enumerate(shape.linears)
    names = {
        linear.name: index
        for index, linear in linears
        if not linear.of_experts and shape.has(layer, index)
    }
    if not names.keys() >= set(_LINEARS[kind]):
        raise _bad(f"row {row} has the module id {kind}: not of this base model", PAIR[1])
    found = [names[name] for name in _LINEARS[kind]]
    d_in = shape.dims(found[0])[0]
    widths = [shape.dims(linear)[1] for linear in found]
    a_end, end = rank * d_in, rank * (d_in + sum(widths))
    if end > len(values) or values[end:].view(np.uint8).any():
        raise _bad(
            f"row {row} is not the {end} values of rank {rank} from {d_in} to {sum(widths)}: the "
            "adapter was made for another base model",
            PAIR[0],
        )
    a = values[:a_end].reshape(rank, d_in)
    b = values[a_end:end].reshape(sum(widths), rank)
    cuts = np.cumsum(widths)[:-1]
    for linear, part in zip(found, np.split(b, cuts), strict=True):
        yield shape.linears[linear].path(layer), a, part


def _config(ranks: dict[str, int], base_model: str, alpha: float | None) -> dict[str, Any]:
    ((rank, _),) = Counter(ranks.values()).most_common(1)
    others = {module: other for module, other in sorted(ranks.items()) if other != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": rank if alpha is None else alpha,
        "rank_pattern": others,
        "alpha_pattern": others if alpha is None else {},
        "target_modules": sorted(ranks),
    }


def _bad(message: str, field: str) -> AdapterRejected:
    return AdapterRejected(f"{field}: {message}", field=field)
