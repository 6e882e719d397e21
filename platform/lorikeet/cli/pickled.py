"""adapter_model.bin, in which PEFT kept weights until 2023.

A pickle can run code when it is opened. torch's weights_only reads tensors and plain containers
and refuses the rest. It is done here alone: offline, on the machine of whoever has the file.
"""

from pathlib import Path
from typing import Any

from lorikeet.errors import InvalidInput, LorikeetError
from lorikeet_engine.adapter_format import CONFIG_FILE, Tensor
from lorikeet_engine.adapter_format.header import parse_json_object

PICKLE = "adapter_model.bin"
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def read_pickle(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """PEFT's tensors by name, and its config. Raises LorikeetError, AdapterRejected."""
    for name in (PICKLE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise InvalidInput(f"{folder} has no {name}")
    try:
        import torch
    except ImportError as error:
        raise LorikeetError(f"reading {PICKLE} needs torch: pip install torch") from error
    try:
        found = torch.load(folder / PICKLE, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the pickle machine stumbles on
        raise InvalidInput(
            f"{PICKLE} is damaged, or holds more than tensors, which is not opened"
            f" ({type(error).__name__})"
        ) from error
    if not isinstance(found, dict) or not all(torch.is_tensor(v) for v in found.values()):
        raise InvalidInput(f"{PICKLE} is not a table of tensors by name")
    config = parse_json_object((folder / CONFIG_FILE).read_bytes(), CONFIG_FILE)
    return {str(name): _tensor(value) for name, value in sorted(found.items())}, config


def _tensor(value: Any) -> Tensor:
    import torch

    kind = str(value.dtype).removeprefix("torch.")
    plain = value.detach().contiguous()
    as_array = plain.view(torch.int16) if plain.dtype is torch.bfloat16 else plain
    return _DTYPES.get(kind, kind), as_array.numpy()
