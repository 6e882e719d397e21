"""Random adapters on every linear layer of a base model, as blobs that an engine can fetch."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import LINEARS, BaseShape, write_blob


class Shelf:
    """An AdapterSource of `count` adapters of one rank in a folder.

    They share their matrices and differ in their scaling: as different for an engine as any
    two adapters, and quickly made.
    """

    def __init__(self, folder: Path, shape: BaseShape, count: int, rank: int) -> None:
        self._folder = folder
        tensors = _tensors(shape, rank)
        with ThreadPoolExecutor(8) as pool:
            self.refs = list(pool.map(partial(self._write, tensors, rank), range(count)))

    def fetch(self, ref: AdapterRef, path: Path) -> None:
        """Copy the blob to path."""
        shutil.copyfile(self._folder / ref.name, path)

    def _write(self, tensors: dict[str, torch.Tensor], rank: int, index: int) -> AdapterRef:
        name = f"random-{index}"
        folder = self._folder / f"{name}-peft"
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank * (1.0 + index / 1024),
            "target_modules": list(LINEARS),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        digest = write_blob(folder, self._folder / name)
        shutil.rmtree(folder)
        return AdapterRef("benchmark", name, 1, digest)


def _tensors(shape: BaseShape, rank: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(shape.layers):
        for index, linear in enumerate(LINEARS):
            d_in, d_out = shape.dims(index)
            block = "self_attn" if index < 4 else "mlp"
            path = f"base_model.model.model.layers.{layer}.{block}.{linear}"
            a = torch.randn(rank, d_in, generator=random) * d_in**-0.5
            b = torch.randn(d_out, rank, generator=random) * (0.1 * rank**-0.5)
            tensors[f"{path}.lora_A.weight"] = a.bfloat16()
            tensors[f"{path}.lora_B.weight"] = b.bfloat16()
    return tensors
