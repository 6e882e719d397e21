"""Reader of adapters in pickles: PEFT's adapter_model.bin of 2023, or trainers' pytorch_model.bin.

Opening a pickle can run code. torch's weights_only reads tensors and plain containers, and refuses
the rest. This module alone opens an adapter's pickle, offline, on the machine of the admin who has
the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorikeet.errors import InvalidInput, LorikeetError
from lorikeet_engine.adapter_format import CONFIG_FILE, WEIGHTS_FILE, Tensor, pickled_weights
from lorikeet_engine.adapter_format.header import parse_json_object

_OF_ADAPTERS = ("lora_", "modules_to_save", "trainable_tokens_")
"""Parts of the names of an adapter's tensors in a state dict of the whole model."""


def read_pickle(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read PEFT's tensors by name, and its config, from a folder with pickled weights.

    A state dict of the whole model, as DeepSpeed's zero_to_fp32.py writes it, is reduced to the
    adapter's tensors.

    Raises LorikeetError if a file is missing, damaged or malformed, or torch is not installed;
    AdapterRejected if the config is malformed.
    """
    if (folder / WEIGHTS_FILE).is_file():
        raise InvalidInput(f"{folder} has {WEIGHTS_FILE} already: register it as it is")
    files = pickled_weights([path.name for path in folder.iterdir()])
    if not files:
        raise InvalidInput(
            f"{folder} has neither an adapter_model.bin or pytorch_model.bin nor TensorRT-LLM's "
            "two tensors"
        )
    _check_shards(folder, files)
    if not (folder / CONFIG_FILE).is_file():
        raise InvalidInput(f"{folder} has no {CONFIG_FILE}, which {files[0]} needs beside it")
    config = parse_json_object((folder / CONFIG_FILE).read_bytes(), CONFIG_FILE)
    tensors: dict[str, Tensor] = {}
    for file in files:
        found = _opened(folder / file)
        if file.startswith("pytorch_model"):
            found = _of_adapter(found, config)
        for name in sorted(found, key=str):
            if str(name) in tensors:
                raise InvalidInput(f"{file}: {name!r} is in another shard, too")
            tensors[str(name)] = _tensor(file, name, found[name])
    return tensors, config


def _check_shards(folder: Path, files: list[str]) -> None:
    """Raise InvalidInput if one of several shards of a pickle is missing.

    files: names of all shards, such as pytorch_model-00001-of-00002.bin, or of a single file.
    """
    stem, _, ending = files[0].rpartition("-of-")
    if not stem:
        return
    count = int(ending.partition(".")[0])
    for number in range(1, count + 1):
        want = f"{stem[:-5]}{number:05}-of-{ending}"
        if want not in files:
            raise InvalidInput(f"{folder} has no {want}, a shard of the weights in {files[0]}")


def _opened(path: Path) -> dict[Any, Any]:
    """Read a pickle, which must be a table of tensors by name. Raises LorikeetError if it is
    not.
    """
    try:
        import torch
    except ImportError as error:
        raise LorikeetError(f"reading {path.name} needs torch: pip install torch") from error
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling documents no exceptions
        raise InvalidInput(
            f"{path.name} is damaged, or holds more than tensors, and is not opened"
            f" ({type(error).__name__})"
        ) from error
    if not isinstance(found, dict) or not all(torch.is_tensor(v) for v in found.values()):
        raise InvalidInput(f"{path.name} is not a table of tensors by name")
    return found


def _of_adapter(found: Mapping[Any, Any], config: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the tensors of the adapter in a state dict of the whole model, as PEFT would save
    them.

    The frozen base model's tensors are left out. Biases stay if the config says that they were
    trained.
    """
    parts = (*_OF_ADAPTERS, *([".bias"] if config.get("bias", "none") != "none" else ()))
    return {name: value for name, value in found.items() if any(p in str(name) for p in parts)}


def _tensor(file: str, name: Any, value: Any) -> Tensor:
    import torch

    dtypes = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    in_blobs = {
        torch.float64: torch.float32,
        torch.float8_e4m3fn: torch.bfloat16,  # which holds every value of float8
        torch.float8_e5m2: torch.bfloat16,
    }
    value = value.to(in_blobs.get(value.dtype, value.dtype))
    if value.dtype not in dtypes or value.layout is not torch.strided:
        want = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidInput(f"{file}: {name!r} is no tensor of {want}")
    plain = value.detach().contiguous()
    if value.dtype is torch.bfloat16:  # numpy has no bfloat16, and only the bytes matter
        plain = plain.view(torch.int16)
    return dtypes[value.dtype], plain.numpy()
