"""Reader of adapter_model.bin, the pickle in which PEFT saved weights until 2023.

Opening a pickle can run code. torch's weights_only reads tensors and plain containers, and refuses
the rest. No other module opens an adapter's pickle, and this one runs offline, on the machine of
the admin who has the file.
"""

from pathlib import Path
from typing import Any

from lorikeet.errors import InvalidInput, LorikeetError
from lorikeet_engine.adapter_format import CONFIG_FILE, WEIGHTS_FILE, Tensor
from lorikeet_engine.adapter_format.header import parse_json_object

PICKLE = "adapter_model.bin"


def read_pickle(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read PEFT's tensors by name, and its config. Raises LorikeetError, AdapterRejected."""
    if not (folder / PICKLE).is_file():
        there = (folder / WEIGHTS_FILE).is_file()
        raise InvalidInput(
            f"{folder} has {WEIGHTS_FILE} already: register it as it is"
            if there
            else f"{folder} has neither {PICKLE} nor TensorRT-LLM's two tensors"
        )
    if not (folder / CONFIG_FILE).is_file():
        raise InvalidInput(f"{folder} has no {CONFIG_FILE}, which {PICKLE} needs beside it")
    try:
        import torch
    except ImportError as error:
        raise LorikeetError(f"reading {PICKLE} needs torch: pip install torch") from error
    try:
        found = torch.load(folder / PICKLE, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling documents no exceptions
        raise InvalidInput(
            f"{PICKLE} is damaged, or holds more than tensors, and is not opened"
            f" ({type(error).__name__})"
        ) from error
    if not isinstance(found, dict) or not all(torch.is_tensor(v) for v in found.values()):
        raise InvalidInput(f"{PICKLE} is not a table of tensors by name")
    config = parse_json_object((folder / CONFIG_FILE).read_bytes(), CONFIG_FILE)
    return {str(name): _tensor(name, found[name]) for name in sorted(found, key=str)}, config


def _tensor(name: Any, value: Any) -> Tensor:
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
        raise InvalidInput(f"{PICKLE}: {name!r} is no tensor of {want}")
    plain = value.detach().contiguous()
    if value.dtype is torch.bfloat16:  # numpy has no bfloat16, and only the bytes matter
        plain = plain.view(torch.int16)
    return dtypes[value.dtype], plain.numpy()
