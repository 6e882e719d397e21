"""Writes a PEFT folder: what other formats are made into."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lorikeet_engine.adapter_format.blob import write_blob
from lorikeet_engine.adapter_format.expressions import CONFIG_FILE
from lorikeet_engine.adapter_format.header import header_bytes
from lorikeet_engine.adapter_format.saved_weights import WEIGHTS_FILE

Tensor = tuple[str, np.ndarray]
"""A dtype as safetensors calls it, and an array of the tensor's shape that holds its bytes."""


def write_peft_folder(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Write a folder that is not there yet, which PEFT reads and write_blob takes.

    Raises AdapterRejected for what write_blob refuses, and then leaves no folder behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
        with (folder / WEIGHTS_FILE).open("wb") as file:
            places = {name: (dtype, array.shape) for name, (dtype, array) in tensors.items()}
            file.write(header_bytes(places, {"format": "pt"}))
            for _, array in tensors.values():
                file.write(array.tobytes())
        with tempfile.TemporaryDirectory() as scratch:
            write_blob(folder, Path(scratch) / "blob")
    except BaseException:
        shutil.rmtree(folder)
        raise
